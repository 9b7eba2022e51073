"""/infer and unary gRPC beside streams from one set of weights: llama_unary passes requests on to a streaming llama.

The full queue is tested with that of llama itself.
"""

from __future__ import annotations

import pytest
from end_to_end.servers import HTTP
from end_to_end.wires import BAD, UNARY, UNARY_WIRES, Refusal, Wire, ask, assert_clean, generate
from end_to_end.wires import unary_infer as infer
from triton_local.server import LocalTriton

REQUEST = {"text_input": "Return a list of the", "max_tokens": 24, "min_tokens": 24, "temperature": 1.0, "seed": 9}
ROWS = {**{name: [[value]] * 3 for name, value in REQUEST.items()}, "seed": [[1], [2], [9]]}

every_wire = pytest.mark.parametrize("wire", UNARY_WIRES, ids=["/infer", "ModelInfer"])


@every_wire
def test_a_unary_request_gets_what_the_streaming_model_answers(streaming: LocalTriton, wire: Wire) -> None:
    expected = [ask(streaming, generate, **REQUEST | {"seed": seed}) for seed in (1, 2, 9)]
    assert wire(streaming, REQUEST) == expected[2:]
    assert wire(streaming, ROWS) == expected


@every_wire
def test_an_error_is_llamas_own(streaming: LocalTriton, wire: Wire) -> None:
    direct, refused = (way(streaming, {**REQUEST, "max_tokens": 10_000}) for way in (generate, wire))
    assert isinstance(direct, Refusal)
    assert refused == direct
    assert refused.kind == BAD
    assert_clean(refused.message)


def test_a_request_for_a_stream_is_refused_by_name(streaming: LocalTriton) -> None:
    refused = infer(streaming, {**REQUEST, "stream": True})
    assert refused == Refusal(BAD, "INVALID_ARG: stream is true; it must be false: llama_unary answers in one response")


def test_request_parameters_reach_the_model(streaming: LocalTriton) -> None:
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    body = {"inputs": [tensor], "parameters": {"temprature": 1}}
    refused = HTTP.post(f"http://{streaming.http_address}/v2/models/{UNARY}/infer", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("INVALID_ARG: 'temprature' is no input of this model")


def test_a_forged_request_is_refused_as_one_with_an_unknown_parameter(streaming: LocalTriton) -> None:
    refused = generate(streaming, {"text_input": "a", UNARY: "[1, true]"})
    assert isinstance(refused, Refusal)
    assert refused.kind == BAD
    assert refused.message.startswith(f"INVALID_ARG: '{UNARY}' is no input of this model")
