"""A Triton whose model `llama` behaves like the product's: real sockets, the same inputs and outputs, no weights."""

from __future__ import annotations

import asyncio
import json
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from triton_llama.tensors import Tensor, Value
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

HOST = "127.0.0.1"
CONTEXT = 512
FIRST_ID = 100
"""The id of an answer's first token; the others count on."""
_FORMATS = {"INT32": "i", "UINT64": "Q", "FP32": "f", "BOOL": "?"}


@dataclass(frozen=True)
class ModelRequest:
    """One request. inputs: the values of each tensor by name. outputs: the requested ones; all, if there are none."""

    id: str
    inputs: dict[str, list[Value]]
    outputs: frozenset[str]

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


@dataclass
class FakeTriton:
    """The model's state and its requests.

    tokens: the text it generates, for every choice. text: makes another text of a request. hold_after: responses of a
    stream after which it generates no more, until the client cancels. failing: a status and a message instead of an
    answer; after_tokens: once that number of responses is sent. cancelled: ids of requests whose client has left.
    """

    port: int = 0
    ready: bool = True
    tokens: list[str] = field(default_factory=lambda: [" Hello", ",", " world", "."])
    text: Callable[[ModelRequest], list[str]] | None = None
    hold_after: int | None = None
    failing: tuple[grpc.StatusCode, str] | None = None
    after_tokens: int = 0
    cached_tokens: int = 0
    end_early: bool = False
    requests: list[ModelRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    running: int = 0

    @property
    def last(self) -> ModelRequest:
        """The newest request."""
        return self.requests[-1]

    def wait_for(self, condition: Callable[[FakeTriton], bool]) -> None:
        """Wait until something has happened here, 20 s at most."""
        deadline = time.monotonic() + 20
        while not condition(self):
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    async def answer(self, request: ModelRequest) -> AsyncIterator[messages.ModelStreamInferResponse]:
        """Yield a request's responses: the tokens of all choices in turn, after those that it resumes."""
        assert request.value("stream"), "the endpoint sends streams alone"
        tokens, reason = self._generated(request)
        seed = request.integer("seed", 7)
        for number in range(len(request.inputs.get("resume_ids", [])), len(tokens)):
            if number == self.hold_after:
                await asyncio.Event().wait()
            for index in range(request.integer("n", 1)):
                last = number == len(tokens) - 1
                yield self._response(request, index, seed + index, tokens[number], number, reason if last else "")

    def _generated(self, request: ModelRequest) -> tuple[list[str], str]:
        tokens = self.tokens if self.text is None else self.text(request)
        room = CONTEXT - request.prompt_tokens
        max_tokens = request.integer("max_tokens", 128)
        if request.value("truncate_max_tokens"):
            max_tokens = min(max_tokens, room)
        stops = [str(word) for word in request.inputs.get("stop_words", [])]
        generated: list[str] = []
        for token in tokens[:max_tokens]:
            if any(stop in "".join([*generated, token]) for stop in stops):
                return [*generated, ""], "stop"
            generated.append(token)
        return generated, "length" if len(tokens) > max_tokens else "stop"

    def _response(
        self, request: ModelRequest, index: int, seed: int, token: str, number: int, reason: str
    ) -> messages.ModelStreamInferResponse:
        message = messages.ModelStreamInferResponse()
        message.infer_response.model_name = "llama"
        _add(message, "text_output", [token])
        _add(message, "finish_reason", [reason])
        _add(message, "num_input_tokens", [request.prompt_tokens])
        _add(message, "num_output_tokens", [1])
        if request.value("return_output_ids"):
            _add(message, "output_ids", [FIRST_ID + number])
            _add(message, "seed", [seed], "UINT64")
        if request.integer("n", 1) > 1:
            _add(message, "sequence_index", [index])
        if reason:
            stops = [str(word) for word in request.inputs.get("stop_words", [])]
            _add(message, "stop_reason", [stops[0] if stops and reason == "stop" else ""])
        if "num_logprobs" in request.inputs:
            top = request.integer("num_logprobs", 0)
            _add(message, "logprobs", [json.dumps([logprobs(text, top) for text in self.tokens[number : number + 1]])])
        if "prompt_logprobs" in request.inputs and number == 0:
            top = request.integer("prompt_logprobs", 0)
            words = str(request.value("text_input", "a b c")).split()
            entries = [None, *(logprobs(f" {word}", top) for word in words[1:])]
            _add(message, "prompt_logprobs", [json.dumps(entries)])
        if reason:
            # The choices after the first find its prompt in the cache.
            _add(message, "num_cached_tokens", [request.prompt_tokens if index else self.cached_tokens])
        return _requested(message, request.outputs)


def logprobs(token: str, top: int) -> dict[str, dict[str, object]]:
    """Return what the model says about a token: itself first, then the likeliest."""
    alternatives = [token, *(f"{token}{number}" for number in range(top))]
    return {
        str(number): {"logprob": -0.5 - number, "rank": number + 1, "decoded_token": text}
        for number, text in enumerate(alternatives[: max(1, top)])
    }


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    """Serve in a thread with an event loop of its own."""
    triton = FakeTriton()
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = grpc.aio.server()
        add_GRPCInferenceServiceServicer_to_server(_Service(triton), server)
        triton.port = server.add_insecure_port(f"{HOST}:0")
        await server.start()
        started.set()
        await stop.wait()
        await server.stop(None)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="fake-triton")
    thread.start()
    try:
        assert started.wait(20)
        yield triton
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


class _Service(GRPCInferenceServiceServicer):  # type: ignore[misc] # generated, without types
    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton

    async def ModelReady(  # noqa: N802 - Triton's name
        self, request: messages.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> messages.ModelReadyResponse:
        return messages.ModelReadyResponse(ready=self._triton.ready and request.name == "llama")

    async def ModelConfig(  # noqa: N802 - Triton's name
        self, request: messages.ModelConfigRequest, context: grpc.aio.ServicerContext
    ) -> messages.ModelConfigResponse:
        response = messages.ModelConfigResponse()
        response.config.name = request.name
        return response

    async def ModelStreamInfer(  # noqa: N802 - Triton's name
        self, requests: AsyncIterator[messages.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[messages.ModelStreamInferResponse]:
        triton = self._triton
        async for message in requests:
            request = _read(message)
            triton.requests.append(request)
            triton.running += 1
            sent = 0
            try:
                async for response in triton.answer(request):
                    if triton.failing is not None and sent == triton.after_tokens:
                        await context.abort(*triton.failing)
                    yield response
                    sent += 1
                    if triton.end_early:
                        return
            except (asyncio.CancelledError, GeneratorExit):
                # GeneratorExit: it was cancelled while gRPC was sending a response.
                triton.cancelled.append(request.id)
                raise
            finally:
                triton.running -= 1


def _read(message: messages.ModelInferRequest) -> ModelRequest:
    inputs: dict[str, list[Value]] = {}
    for tensor, content in zip(message.inputs, message.raw_input_contents, strict=True):
        assert tensor.shape[0] == 1, f"{tensor.name} has shape {tensor.shape}"
        values = _values(tensor.datatype, content)
        assert len(values) == tensor.shape[1], f"{tensor.name} has {len(values)} values, shape {tensor.shape}"
        inputs[tensor.name] = values
    return ModelRequest(message.id, inputs, frozenset(output.name for output in message.outputs))


def _values(datatype: str, content: bytes) -> list[Value]:
    if datatype != "BYTES":
        code = _FORMATS[datatype]
        return list(struct.unpack(f"<{len(content) // struct.calcsize(code)}{code}", content))
    texts: list[Value] = []
    while content:
        size = int.from_bytes(content[:4], "little")
        texts.append(content[4 : 4 + size].decode())
        content = content[4 + size :]
    return texts


def _requested(message: messages.ModelStreamInferResponse, names: frozenset[str]) -> messages.ModelStreamInferResponse:
    """Return a response with those outputs alone; with all, where none is named."""
    response = messages.ModelStreamInferResponse()
    for output, content in zip(message.infer_response.outputs, message.infer_response.raw_output_contents, strict=True):
        if not names or output.name in names:
            response.infer_response.outputs.append(output)
            response.infer_response.raw_output_contents.append(content)
    return response


def _add(
    message: messages.ModelStreamInferResponse, name: str, values: Sequence[str | int], datatype: str = "INT32"
) -> None:
    datatype = "BYTES" if isinstance(values[0], str) else datatype
    message.infer_response.outputs.add(name=name, datatype=datatype, shape=[len(values)])
    message.infer_response.raw_output_contents.append(Tensor(name, datatype, tuple(values)).encode())
