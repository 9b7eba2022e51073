"""A Triton whose model `llama` behaves like the product's: real sockets, the same inputs and outputs, no weights."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from frontend.descriptions import CONTEXT, description_of
from frontend.model_request import ModelRequest, read_request
from triton_llama.tensors import Tensor
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

HOST = "127.0.0.1"
FIRST_ID = 100
"""The id of an answer's first token; the others count on."""
DRAFT_TOKENS = ("num_accepted_draft_tokens", "num_rejected_draft_tokens")


@dataclass
class FakeTriton:
    """The model's state and its requests.

    models: their descriptions by name. tokens: the text it generates, for every choice. text: makes another text of a
    request. by_seed: of a choice's seed. one_by_one: it generates one choice after the other. hold_after: tokens of a
    choice after which it generates no more, while that is so. failing: an error's message instead of an answer, with a
    status if there is one, to that number of requests (failures); after_tokens: once that number of responses is sent.
    broken: changes each response after the first. die_after: responses after which the server dies, once; restarts: it
    is there again at once. draft_tokens: accepted and rejected ones of each choice. cancelled: ids of requests whose
    client has left. adapters: the versions of the loaded adapters by name. hold_descriptions: while it is
    so, descriptions are made but not sent. descriptions, whole_descriptions: their numbers; they aren't among the
    requests, as updates of adapters aren't.
    """

    port: int = 0
    server: Server | None = None
    ready: bool = True
    models: dict[str, dict[str, object]] = field(default_factory=lambda: {"llama": description_of()})
    adapters: dict[str, str] = field(default_factory=dict)
    hold_descriptions: bool = False
    decoupled: bool = True
    tokens: list[str] = field(default_factory=lambda: [" Hello", ",", " world", "."])
    text: Callable[[ModelRequest], list[str]] | None = None
    by_seed: Callable[[int], list[str]] | None = None
    one_by_one: bool = False
    hold_after: int | None = None
    failing: str | None = None
    failures: float = math.inf
    status: grpc.StatusCode | None = None
    broken: Callable[[messages.ModelStreamInferResponse], object] | None = None
    after_tokens: int = 0
    die_after: int | None = None
    restarts: bool = False
    cached_tokens: int = 0
    draft_tokens: tuple[int, int] | None = None
    end_early: bool = False
    requests: list[ModelRequest] = field(default_factory=list)
    updates: list[ModelRequest] = field(default_factory=list)
    descriptions: int = 0
    whole_descriptions: int = 0
    cancelled: list[str] = field(default_factory=list)
    running: int = 0

    def kill(self) -> None:
        """End every connection, and listen no more."""
        assert self.server is not None
        self.server.stop()

    def start(self) -> None:
        """Serve again, at the same port."""
        assert self.server is not None
        self.server.start()

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
        """Yield a request's responses: the tokens of all choices, after those that it resumes."""
        assert bool(request.value("stream")) is self.decoupled, "clients send streams"
        first, seed = len(request.inputs.get("resume_ids", [])), request.integer("seed", 7)
        choices = [self._generated(request, seed + index) for index in range(request.integer("n", 1))]
        order = [(number, index) for index, (tokens, _) in enumerate(choices) for number in range(first, len(tokens))]
        for number, index in order if self.one_by_one else sorted(order):
            while number == self.hold_after:
                await asyncio.sleep(0.01)
            tokens, reason = choices[index]
            last = number == len(tokens) - 1
            yield self._response(request, index, seed + index, tokens[number], number, reason if last else "")

    async def describe(self, model: str, request: ModelRequest) -> messages.ModelStreamInferResponse:
        """Return the description of a model; the error of an older server for one without."""
        self.descriptions += 1
        description = self.models.get(model)
        if description is None:
            error = f"unexpected inference input 'description_digest' for model '{model}'"
            return messages.ModelStreamInferResponse(error_message=error)
        message = messages.ModelStreamInferResponse()
        if description["digest"] == request.value("description_digest"):
            description = {"digest": description["digest"]}
        else:
            self.whole_descriptions += 1
        _add(message, "text_output", [json.dumps(description | {"adapters": self._listed()})])
        while self.hold_descriptions:
            await asyncio.sleep(0.01)
        return message

    def update(self, request: ModelRequest) -> messages.ModelStreamInferResponse:
        """Load or unload an adapter, whose folder's name is its version; return all, or why not."""
        self.updates.append(request)
        name, path = str(request.value("lora_name")), str(request.value("lora_path"))
        message = messages.ModelStreamInferResponse()
        if path == "damaged":
            message.error_message = f"INVALID_ARG: lora_path is {path!r}; it must be a folder with an adapter"
        elif not path and name not in self.adapters:
            message.error_message = self._unknown_adapter(name)
        else:
            self.adapters[name] = path
            if not path:
                del self.adapters[name]
            _add(message, "text_output", [json.dumps(self._listed())])
        return message

    def _listed(self) -> list[dict[str, object]]:
        return [{"name": name, "number": 0, "digest": digest, "rank": 8} for name, digest in self.adapters.items()]

    def _unknown_adapter(self, name: str) -> str:
        return f"INVALID_ARG: lora_name is {name!r}; it must be one of {', '.join(self.adapters)}"

    def refusal(self, model: str, request: ModelRequest) -> str | None:
        """Return why a request with a prompt is refused: it names another model, or another version of an adapter."""
        if request.value("description_digest") not in (None, self.models[model]["digest"]):
            return "OTHER_MODEL: another model is served"
        name = request.value("lora_name")
        if name is None or request.value("lora_digest") == self.adapters.get(str(name)):
            return None
        if name not in self.adapters:
            return self._unknown_adapter(str(name))
        return f"OTHER_ADAPTER: lora_name {name!r} is another version than the one of the request's lora_digest"

    def _generated(self, request: ModelRequest, seed: int) -> tuple[list[str], str]:
        tokens = self.tokens if self.text is None else self.text(request)
        tokens = tokens if self.by_seed is None else self.by_seed(seed)
        room = CONTEXT - request.prompt_tokens
        max_tokens = request.integer("max_tokens", 128)
        if request.value("truncate_max_tokens"):
            max_tokens = min(max_tokens, room)
        stops = [str(word) for word in request.inputs.get("stop_words", []) if word]
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
            stops = [str(word) for word in request.inputs.get("stop_words", []) if word]
            _add(message, "stop_reason", [stops[0] if stops and reason == "stop" else ""])
        if "num_logprobs" in request.inputs:
            top = request.integer("num_logprobs", 0)
            _add(message, "logprobs", [json.dumps([logprobs(token, top)])])
        if "prompt_logprobs" in request.inputs and number == 0:
            top = request.integer("prompt_logprobs", 0)
            words = str(request.value("text_input", "a b c")).split()
            entries = [None, *(logprobs(f" {word}", top) for word in words[1:])]
            _add(message, "prompt_logprobs", [json.dumps(entries)])
        if reason:
            # The choices after the first find its prompt in the cache.
            _add(message, "num_cached_tokens", [request.prompt_tokens if index else self.cached_tokens])
            for name, count in zip(DRAFT_TOKENS, self.draft_tokens or (), strict=False):
                _add(message, name, [count])
        return _requested(message, request.outputs)


def logprobs(token: str, top: int) -> dict[str, dict[str, object]]:
    """Return what the model says about a token: itself first, then the likeliest."""
    alternatives = [token, *(f"{token}{number}" for number in range(top))]
    return {
        str(number): {"logprob": -0.5 - number, "rank": number + 1, "decoded_token": text}
        | ({"bytes": [0xC3]} if text == "\ufffd" else {})
        for number, text in enumerate(alternatives[: max(1, top)])
    }


class Server:
    """The fake's sockets, served in a thread with an event loop of its own."""

    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-triton")
        self._thread.start()
        self._server: grpc.aio.Server | None = None
        self.start()

    def start(self) -> None:
        """Listen, at the fake's port once it has one."""
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(20)

    def stop(self) -> None:
        """Cancel every call and close the port."""
        asyncio.run_coroutine_threadsafe(self.die(), self._loop).result(20)

    async def die(self, *, restarts: bool = False) -> None:
        """Do the same within the loop; listen again if it restarts."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)
        if restarts:
            await self._start()

    def close(self) -> None:
        """End the thread."""
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        add_GRPCInferenceServiceServicer_to_server(_Service(self._triton), self._server)
        self._triton.port = self._server.add_insecure_port(f"{HOST}:{self._triton.port}")
        await self._server.start()


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    """Serve in a thread with an event loop of its own."""
    triton = FakeTriton()
    triton.server = Server(triton)
    try:
        yield triton
    finally:
        triton.server.close()


class _Service(GRPCInferenceServiceServicer):  # type: ignore[misc] # generated, without types
    def __init__(self, triton: FakeTriton) -> None:
        self._triton = triton

    async def ModelReady(  # noqa: N802 - Triton's name
        self, request: messages.ModelReadyRequest, context: grpc.aio.ServicerContext
    ) -> messages.ModelReadyResponse:
        return messages.ModelReadyResponse(ready=self._triton.ready and request.name in self._triton.models)

    async def ModelConfig(  # noqa: N802 - Triton's name
        self, request: messages.ModelConfigRequest, context: grpc.aio.ServicerContext
    ) -> messages.ModelConfigResponse:
        response = messages.ModelConfigResponse()
        response.config.model_transaction_policy.decoupled = self._triton.decoupled
        return response

    async def ModelInfer(  # noqa: N802 - Triton's name
        self, message: messages.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> messages.ModelInferResponse:
        (response,) = [response async for response in self._answer(message, context)]
        return response.infer_response

    async def ModelStreamInfer(  # noqa: N802 - Triton's name
        self, requests: AsyncIterator[messages.ModelInferRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[messages.ModelStreamInferResponse]:
        async for message in requests:
            async for response in self._answer(message, context):
                yield response

    async def _answer(
        self, message: messages.ModelInferRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[messages.ModelStreamInferResponse]:
        triton = self._triton
        request = read_request(message, dict(context.invocation_metadata()))
        if not request.inputs.keys() & {"text_input", "input_ids"}:
            is_update = "lora_path" in request.inputs
            yield triton.update(request) if is_update else await triton.describe(message.model_name, request)
            return
        if error := triton.refusal(message.model_name, request):
            yield messages.ModelStreamInferResponse(error_message=error)
            return
        triton.requests.append(request)
        triton.running += 1
        sent = 0
        try:
            async for response in triton.answer(request):
                if triton.failing is not None and sent == triton.after_tokens and triton.failures > 0:
                    triton.failures -= 1
                    if triton.status is not None:
                        await context.abort(triton.status, triton.failing)
                    yield messages.ModelStreamInferResponse(error_message=triton.failing)
                    return
                if sent == triton.die_after:
                    triton.die_after = None
                    assert triton.server is not None
                    dying = asyncio.create_task(triton.server.die(restarts=triton.restarts))
                    # It cancels this call, too.
                    await asyncio.shield(dying)
                if sent and triton.broken is not None:
                    triton.broken(response)
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
