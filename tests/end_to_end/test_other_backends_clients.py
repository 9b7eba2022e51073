"""What clients of other backends send, as they send it: to llama, and to `ensemble` and `vllm_model` of compatibility/.

Names, types, shapes and what is read of the answers are those of TensorRT-LLM's `end_to_end_grpc_client.py`,
LlamaIndex's `NvidiaTriton` and vllm_backend's `client.py`; docs/api.md has runs of the programs themselves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from end_to_end.servers import HTTP
from end_to_end.streams import GrpcStream
from end_to_end.wires import Answer, Inputs, ask, generate
from numpy.typing import NDArray
from triton_local.server import LocalTriton
from tritonclient.utils import InferenceServerException

PROMPT = "Return a list of the"
TOKENS = 12


def responses(
    server: LocalTriton,
    model: str,
    inputs: Inputs,
    outputs: Sequence[str] = ("text_output",),
    parameters: dict[str, str] | None = None,
) -> list[dict[str, NDArray[Any]]]:
    """Ask over a stream as these clients do; return the outputs of all responses."""
    wanted = [tritonclient.grpc.InferRequestedOutput(name) for name in outputs]
    with GrpcStream(server) as stream:
        stream.ask(inputs, model=model, outputs=wanted, parameters=parameters)
        return stream.outputs()


# All options of end_to_end_grpc_client.py that llama knows.
TENSORRT_LLM: dict[str, object] = {
    "text_input": PROMPT,
    "max_tokens": TOKENS,
    "stream": False,
    "beam_width": 1,
    "temperature": 1.0,
    "bad_words": ["foo", "bar"],
    "stop_words": ["snowman"],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "embedding_bias_words": ["cat", "list"],
    "embedding_bias_weights": [1.5, -2.0],
    "end_id": 2,
    "pad_id": 2,
    "exclude_input_in_output": True,
    # Another client's: the text is to be the same again.
    "random_seed": 7,
}


def test_an_ensemble_answers_tensorrt_llms_client_as_llama_does(narrow_streaming: LocalTriton) -> None:
    (whole,) = responses(narrow_streaming, "ensemble", TENSORRT_LLM)
    (same,) = responses(narrow_streaming, "llama", TENSORRT_LLM)
    assert whole["text_output"].shape == (1,)
    assert whole["text_output"][0].decode()
    assert whole["text_output"].tolist() == same["text_output"].tolist()
    inputs = TENSORRT_LLM | {"return_log_probs": True}
    (logged,) = responses(narrow_streaming, "ensemble", inputs, ("text_output", "cum_log_probs", "output_log_probs"))
    assert logged["cum_log_probs"].shape == (1,)
    assert np.isclose(logged["output_log_probs"].sum(), logged["cum_log_probs"][0], rtol=1e-4)


def test_langchains_class_with_uint32_streams_greedily(narrow_streaming: LocalTriton) -> None:
    neutral = dict.fromkeys(("temperature", "length_penalty", "repetition_penalty"), 1.0)
    whole = {"max_tokens": TOKENS, "top_k": 1, "beam_width": 1}
    uint32 = {name: np.array([[value]], np.uint32) for name, value in whole.items()}
    inputs = {"text_input": PROMPT, **neutral, **uint32, "top_p": 0.0, "random_seed": 0, "stream": True}
    chunks = responses(narrow_streaming, "ensemble_uint32", inputs)
    assert len(chunks) > 1
    greedy = {"text_input": PROMPT, "max_tokens": TOKENS, "temperature": 0.0, "repetition_penalty": 1.0}
    expected = ask(narrow_streaming, generate, **greedy)
    assert b"".join(chunk["text_output"][0] for chunk in chunks).decode() == expected.text


PARAMETERS = {"temperature": "0.0", "top_p": "0.95", "max_tokens": str(TOKENS)}


def vllm(stream: bool, **more: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """Return the inputs of vllm_backend's client.py without its sampling parameters."""
    return {"text_input": np.array([PROMPT.encode()], np.object_), "stream": np.array([stream]), **more}


def sampling(**values: object) -> NDArray[Any]:
    """Return its tensor of sampling parameters."""
    return np.array([json.dumps(PARAMETERS | values).encode()], np.object_)


@pytest.fixture
def greedy(narrow_streaming: LocalTriton) -> Answer:
    """Llama's own answer to vllm_backend's client."""
    return ask(narrow_streaming, generate, text_input=PROMPT, max_tokens=TOKENS, temperature=0.0)


@pytest.mark.parametrize("where", ["tensor", "parameters"])
def test_vllm_backends_client_gets_llamas_text(narrow_streaming: LocalTriton, greedy: Answer, where: str) -> None:
    tensor = {} if where == "parameters" else {"sampling_parameters": sampling()}
    parameters = None if where == "tensor" else PARAMETERS
    (whole,) = responses(narrow_streaming, "vllm_model", vllm(False, **tensor), ("text_output",), parameters)
    # Without `stream` the prompt precedes the text, as there.
    assert whole["text_output"].tolist() == [(PROMPT + greedy.text).encode()]
    chunks = responses(narrow_streaming, "vllm_model", vllm(True, **tensor), ("text_output",), parameters)
    assert len(chunks) > 1
    assert b"".join(chunk["text_output"][0] for chunk in chunks).decode() == greedy.text


def test_vllm_backends_outputs_come_where_they_are_asked_for(narrow_streaming: LocalTriton, greedy: Answer) -> None:
    names = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    returns = {f"return_{name}": np.array([True]) for name in names}
    inputs = vllm(True, sampling_parameters=sampling(logprobs=1), **returns)
    chunks = responses(narrow_streaming, "vllm_model", inputs, ("text_output", *names))
    assert {frozenset(chunk) for chunk in chunks} == {frozenset(("text_output", *names))}
    reasons = [chunk["finish_reason"][0] for chunk in chunks]
    assert reasons == [b"None"] * (len(chunks) - 1) + [greedy.finish_reason.encode()]
    assert {chunk["num_input_tokens"].dtype.name for chunk in chunks} == {"uint32"}
    assert {int(chunk["num_input_tokens"][0]) for chunk in chunks} == {greedy.num_input_tokens}
    assert sum(int(chunk["num_output_tokens"][0]) for chunk in chunks) == greedy.num_output_tokens
    logged = [entry for chunk in chunks for entry in json.loads(chunk["logprobs"][0])]
    total = sum(next(iter(entry.values()))["logprob"] for entry in logged)
    assert np.isclose(chunks[-1]["cumulative_logprob"][0], total, rtol=1e-4)
    (bare,) = responses(narrow_streaming, "vllm_model", vllm(False, sampling_parameters=sampling()), ())
    assert set(bare) == {"text_output"}


def test_an_error_of_vllm_model_keeps_its_message(narrow_streaming: LocalTriton) -> None:
    with pytest.raises(InferenceServerException, match=r"^INVALID_ARG: temperature is '9'; it must be a finite number"):
        responses(narrow_streaming, "vllm_model", vllm(True, sampling_parameters=sampling(temperature="9")))
    url = f"http://{narrow_streaming.http_address}/v2/models/vllm_model/generate"
    refused = HTTP.post(url, json={"text_input": PROMPT, "sampling_parameters": '{"best_of": 2}'})
    assert refused.status_code == 400
    assert "best_of" in refused.json()["error"]
