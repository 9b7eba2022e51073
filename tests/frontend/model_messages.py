"""Requests as the fake model reads them, and its responses: the outputs that a request asks for."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triton_llama.tensors import Tensor, Value, decode
from tritonclient.grpc import service_pb2 as messages

FIRST_ID = 100
"""The id of an answer's first token; the others count on."""
TIMES_NS = {
    "arrival_time_ns": 1_000,
    "first_scheduled_time_ns": 5_000,
    "first_token_time_ns": 25_000,
    "last_token_time_ns": 55_000,
}
"""The times of a request's first choice; every further one is 10,000 ns later."""


@dataclass(frozen=True)
class ModelRequest:
    """One request. inputs: the values of each tensor by name. outputs: the requested ones; all, if there are none."""

    id: str
    inputs: dict[str, list[Value]]
    outputs: frozenset[str]
    metadata: dict[str, str | bytes]
    traceparent: str = ""

    def value(self, name: str, default: Value | None = None) -> Value | None:
        """Return an input's only value."""
        return self.inputs[name][0] if name in self.inputs else default

    def integer(self, name: str, default: int) -> int:
        """Return an input's only value, an integer."""
        value = self.value(name, default)
        assert isinstance(value, int)
        return value

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt: its words, or the ids."""
        if "input_ids" in self.inputs:
            return len(self.inputs["input_ids"])
        return len(str(self.value("text_input")).split())


def read_request(message: messages.ModelInferRequest, metadata: dict[str, str | bytes]) -> ModelRequest:
    """Return a request, checked against the shapes of its tensors."""
    inputs: dict[str, list[Value]] = {}
    for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True):
        assert tensor.shape[0] == 1, f"{tensor.name} has shape {tensor.shape}"
        values = _values(tensor.datatype, content)
        assert len(values) == tensor.shape[1], f"{tensor.name} has {len(values)} values, shape {tensor.shape}"
        inputs[tensor.name] = values
    traceparent = message.parameters["traceparent"].string_param
    outputs = frozenset(output.name for output in message.outputs)
    return ModelRequest(message.id, inputs, outputs, metadata, traceparent)


def _values(datatype: str, content: bytes) -> list[Value]:
    return [byte == 1 for byte in content] if datatype == "BOOL" else [*decode("input", datatype, content)]


@dataclass(frozen=True)
class Token:
    """A generated token. number: its place in the choice, from 0. reason: why the choice ends with it, else empty."""

    choice: int
    seed: int
    text: str
    number: int
    reason: str


def token_response(request: ModelRequest, token: Token, counts: Mapping[str, int]) -> messages.ModelStreamInferResponse:
    """Return the response with one token. counts: outputs of a choice's last response."""
    message = messages.ModelStreamInferResponse()
    message.infer_response.model_name = "llama"
    add_output(message, "text_output", [token.text])
    add_output(message, "finish_reason", [token.reason])
    add_output(message, "num_input_tokens", [request.prompt_tokens])
    add_output(message, "num_output_tokens", [1])
    if request.value("return_output_ids"):
        add_output(message, "output_ids", [FIRST_ID + token.number])
        add_output(message, "seed", [token.seed], "UINT64")
    if request.integer("n", 1) > 1:
        add_output(message, "sequence_index", [token.choice])
    if token.reason:
        stops = [str(word) for word in request.inputs.get("stop_words", []) if word]
        add_output(message, "stop_reason", [stops[0] if stops and token.reason == "stop" else ""])
    if "num_logprobs" in request.inputs:
        top = request.integer("num_logprobs", 0)
        add_output(message, "logprobs", [json.dumps([logprobs(token.text, top)])])
    if "prompt_logprobs" in request.inputs and token.number == 0:
        top = request.integer("prompt_logprobs", 0)
        words = str(request.value("text_input", "a b c")).split()
        entries = [None, *(logprobs(f" {word}", top) for word in words[1:])]
        add_output(message, "prompt_logprobs", [json.dumps(entries)])
    if token.reason:
        for name, count in counts.items():
            add_output(message, name, [count])
        for name, time_ns in TIMES_NS.items() if request.value("return_perf_metrics") else ():
            add_output(message, name, [time_ns + 10_000 * token.choice], "INT64")
    return _requested(message, request.outputs)


def embedding_response(request: ModelRequest) -> messages.ModelStreamInferResponse:
    """Return the response with a prompt's embedding."""
    message = messages.ModelStreamInferResponse()
    for name in ("text_output", "finish_reason"):
        add_output(message, name, ["stop" if name == "finish_reason" else ""])
    add_output(message, "num_input_tokens", [request.prompt_tokens])
    add_output(message, "num_output_tokens", [0])
    add_output(message, "embedding", embedding_of(request.prompt_tokens), "FP32")
    return _requested(message, request.outputs)


def embedding_of(prompt_tokens: int) -> list[float]:
    """Return the embedding [4] of a prompt with that number of tokens; its length is 1."""
    values = [float(prompt_tokens), 2.0, 3.0, 4.0]
    return [value / math.hypot(*values) for value in values]


def logprobs(token: str, top: int) -> dict[str, dict[str, object]]:
    """Return what the model says about a token: itself first, then the likeliest."""
    alternatives = [token, *(f"{token}{number}" for number in range(top))]
    return {
        str(number): {"logprob": -0.5 - number, "rank": number + 1, "decoded_token": text}
        | ({"bytes": [0xC3]} if text == "\ufffd" else {})
        for number, text in enumerate(alternatives[: max(1, top)])
    }


def _requested(message: messages.ModelStreamInferResponse, names: frozenset[str]) -> messages.ModelStreamInferResponse:
    """Return a response with those outputs alone; with all, where none is named."""
    response = messages.ModelStreamInferResponse()
    for output, content in zip(message.infer_response.outputs, message.infer_response.raw_output_contents, strict=True):
        if not names or output.name in names:
            response.infer_response.outputs.append(output)
            response.infer_response.raw_output_contents.append(content)
    return response


def add_output(
    message: messages.ModelStreamInferResponse, name: str, values: Sequence[Value], datatype: str = "INT32"
) -> None:
    """Add an output to a response; strings are BYTES, whatever the datatype."""
    datatype = "BYTES" if isinstance(values[0], str) else datatype
    message.infer_response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    message.infer_response.raw_output_contents.append(Tensor(name, datatype, tuple(values)).encode())
