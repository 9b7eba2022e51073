"""The description of the served model, from a real Triton."""

from __future__ import annotations

import json

import numpy as np
import tritonclient.grpc
from end_to_end.servers import EMBEDDED, TIMEOUT_S
from end_to_end.wires import MODEL, UNARY, post, tensors
from tokenizers import Tokenizer
from triton_local.server import LocalTriton


def _ask(server: LocalTriton, model: str) -> str:
    """Return the text_output of a ModelInfer request."""
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        request = tensors(tritonclient.grpc.InferInput, {"description_digest": np.array([[b""]], np.object_)})
        result = client.infer(model, request, client_timeout=TIMEOUT_S)
    (text,) = result.as_numpy("text_output")
    return str(text.decode())


def test_a_client_gets_the_tokenizer_of_the_served_model(triton: LocalTriton) -> None:
    described = Tokenizer.from_str(json.loads(_ask(triton, MODEL))["tokenizer"])
    own = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    assert described.to_str() == own.to_str()


def test_a_stream_and_a_forwarded_request_get_the_same_description(streaming: LocalTriton) -> None:
    streamed = post(streaming, "generate", {"description_digest": ""}).json()
    assert streamed["text_output"] == _ask(streaming, UNARY)
