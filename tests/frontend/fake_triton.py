"""A Triton whose model `llama` behaves like the product's: real sockets, the same inputs and outputs, no weights.

What it answers is here; `fake_triton_grpc` sends it, or fails as the fields here say.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import grpc
from frontend.descriptions import CONTEXT, description_of
from frontend.model_messages import ModelRequest, Token, add_output, embedding_response, token_response
from tritonclient.grpc import service_pb2 as messages

if TYPE_CHECKING:
    from frontend.fake_triton_grpc import Server

DRAFT_TOKENS = ("num_accepted_draft_tokens", "num_rejected_draft_tokens")


@dataclass
class FakeTriton:
    """The model's state and its requests.

    models: their descriptions by name. adapters: the versions of the loaded ones by name. hold_descriptions: while it
    is so, descriptions are made but not sent. tokens: the text it generates, for every choice. text: makes another
    text of a request. by_seed: of a choice's seed. one_by_one: it generates one choice after the other. hold_after:
    tokens of a choice after which it generates no more, while that is so. failing: an error's message instead of an
    answer, with a status if there is one, to that number of requests (failures); after_tokens: once that number of
    responses is sent. broken: changes each response after the first. die_after: responses after which the server dies,
    once; restart: called then, before it is there again. draft_tokens: accepted and rejected ones of each choice.
    cancelled: ids of requests whose client has left. descriptions, whole_descriptions: their numbers; they aren't among
    the requests, as updates of adapters aren't.
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
    restart: Callable[[], object] | None = None
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

    def reset(self) -> None:
        """Let running requests end, then be as if just started, with the same models and adapters."""
        self.hold_after = None
        self.wait_for(lambda fake: not fake.running)
        fresh = FakeTriton(self.port, self.server, models=self.models, adapters=self.adapters)
        for each in fields(FakeTriton):
            setattr(self, each.name, getattr(fresh, each.name))

    def start(self) -> None:
        """Serve again, at the same port."""
        assert self.server is not None
        self.server.start()

    @property
    def last(self) -> ModelRequest:
        """The newest request."""
        return self.requests[-1]

    @property
    def prompt(self) -> str:
        """The newest prompt; a text."""
        return str(self.last.value("text_input"))

    @property
    def guide(self) -> dict[str, Any]:
        """The newest request's guide, a JSON schema."""
        guide: dict[str, Any] = json.loads(str(self.last.value("guided_decoding_guide")))
        return guide

    def wait_for(self, condition: Callable[[FakeTriton], bool]) -> None:
        """Wait until something has happened here, 20 s at most."""
        deadline = time.monotonic() + 20
        while not condition(self):
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.01)

    async def answer(self, request: ModelRequest) -> AsyncIterator[messages.ModelStreamInferResponse]:
        """Yield a request's responses: its embedding, or the tokens of all choices, after those that it resumes."""
        if request.value("return_embedding"):
            while self.hold_after == 0:
                await asyncio.sleep(0.01)
            yield embedding_response(request)
            return
        assert bool(request.value("stream")) is self.decoupled, "clients send streams"
        first, seed = len(request.inputs.get("resume_ids", [])), request.integer("seed", 7)
        choices = [self._generated(request, seed + index) for index in range(request.integer("n", 1))]
        order = [(number, index) for index, (tokens, _) in enumerate(choices) for number in range(first, len(tokens))]
        for number, index in order if self.one_by_one else sorted(order):
            while number == self.hold_after:
                await asyncio.sleep(0.01)
            tokens, reason = choices[index]
            last = number == len(tokens) - 1
            token = Token(index, seed + index, tokens[number], number, reason if last else "")
            yield token_response(request, token, self._counts(request, index))

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
        add_output(message, "text_output", [json.dumps(description | {"adapters": self._listed()})])
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
            add_output(message, "text_output", [json.dumps(self._listed())])
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

    def _counts(self, request: ModelRequest, choice: int) -> dict[str, int]:
        # The choices after the first find its prompt in the cache.
        cached = request.prompt_tokens if choice else self.cached_tokens
        return {"num_cached_tokens": cached, **dict(zip(DRAFT_TOKENS, self.draft_tokens or (), strict=False))}


def unchanged() -> None:
    """Change nothing before the restart."""
