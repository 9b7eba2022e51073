"""A server in a situation: the requests that it has accepted, and what became of them after a stop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from server.metrics import PENDING
from server.stops.outcomes import End, Expected, Outcome, Text, end_of
from triton_llama import AsyncLlamaClient, SamplingParams
from triton_llama.endpoint import Protocol

from perf import metrics

PROMPT = "Return a list of"
TOKENS = 480
"""Of each request: about a second for 32 of them on two cores."""

ANSWERED = frozenset({Outcome.COMPLETE, Outcome.REFUSED})

_TIMEOUT_S = 120.0
"""Of a request: longer than the grace period and what follows it."""
_PATIENCE_S = 60.0
_POLL_S = 0.02
_LOAD = ("llama_slots_in_use", "llama_waiting_rows", PENDING)
_MOST_UNARY = 32
"""Under way in llama_unary; more wait where no metric shows them."""


class CellError(AssertionError):
    """A situation that didn't come about, or a stop that didn't end; the message is one line."""


@dataclass(frozen=True)
class Addresses:
    """host:port of each service."""

    http: str
    grpc: str
    metrics: str


@dataclass(frozen=True)
class Request:
    """A request that the server has accepted. permitted: the outcomes that are no loss."""

    name: str
    task: asyncio.Task[End]
    permitted: frozenset[Outcome]


@dataclass(frozen=True)
class Load:
    """Requests in the model's slots, and waiting in the model and in Triton's queue, just before the stop."""

    running: int
    waiting: int


@dataclass
class Scene:
    """One server, entered before the situation and left after the stop.

    streams: whether the config streams (decoupled), with llama_unary beside. network_ends: as in Stop.
    at_stop: called when the stop begins.
    stopped: set once it is over.
    """

    addresses: Addresses
    streams: bool
    network_ends: bool = False
    expected: Expected = field(default_factory=lambda: Expected({}))
    at_stop: list[Callable[[], object]] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[Request] = field(default_factory=list)
    closing: AsyncExitStack = field(default_factory=AsyncExitStack)
    _before: dict[str, float] = field(default_factory=dict)
    _sent: int = 0
    _unary: int = 0
    _clients: dict[tuple[Protocol, str], AsyncLlamaClient] = field(default_factory=dict)

    async def __aenter__(self) -> Self:
        await self.closing.__aenter__()
        self._before = await asyncio.to_thread(self._metrics)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._cancel()
        await self.closing.aclose()

    def add(self, name: str, end: Coroutine[Any, Any, End], permitted: Iterable[Outcome] = ANSWERED) -> Request:
        """Send one request of one row; `wait_until_accepted` waits until the model or its queue has it."""
        request = Request(name, asyncio.create_task(end), frozenset(permitted))
        self.requests.append(request)
        self._sent += 1
        return request

    def ask(
        self,
        count: int,
        prompt: Callable[[int], str] = lambda _: PROMPT,
        tokens: int = TOKENS,
        permitted: Iterable[Outcome] = ANSWERED,
    ) -> list[Request]:
        """Send requests with the client library, in every way of the config: HTTP, gRPC, streams, llama_unary."""
        protocols: tuple[Protocol, ...] = ("http", "grpc")
        whole = [self._generate(protocol, "llama_unary" if self.streams else "llama") for protocol in protocols]
        streams = [self._stream(protocol) for protocol in protocols]
        sent = []
        for number in range(count):
            at_once = not self.streams or (number % 4 < 2 and self._unary < _MOST_UNARY)
            self._unary += at_once
            name, way = (whole if at_once else streams)[number % 2]
            text = prompt(number)
            end = end_of(way(text, _greedy(tokens)), self.expected, text, tokens)
            sent.append(self.add(name, end, permitted))
        return sent

    async def wait_until_accepted(self, running: int | None = None, waiting: int | None = None) -> Load:
        """Wait until all that was sent has reached the model or its queue; return how many run and wait.

        running, waiting: how many at least. Raises CellError if it doesn't happen, or no longer can.
        """
        # Not in the event loop, which reads streams and may be busy for seconds.
        return await asyncio.to_thread(self._wait_until_accepted, running or 0, waiting or 0)

    def _wait_until_accepted(self, running: int, waiting: int) -> Load:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            now = self._metrics()
            load = Load(int(now["llama_slots_in_use"]), int(now["llama_waiting_rows"] + now[PENDING]))
            ended = int(now["llama_requests_total"] - self._before["llama_requests_total"])
            if (
                ended + load.running + load.waiting >= self._sent
                and load.running >= running
                and load.waiting >= waiting
            ):
                return load
            if time.monotonic() > deadline or ended == self._sent != 0:
                raise CellError(
                    f"{load.running} run, {load.waiting} wait and {ended} of {self._sent} have ended, instead of "
                    f"{running or 'any'} and {waiting or 'any'}"
                )
            time.sleep(_POLL_S)

    async def forget(self) -> list[str]:
        """Cancel the requests so far and leave them out; return each that ended as it must not, in a line."""
        ended = [request for request in self.requests if request.task.done()]
        _, losses = _outcomes(ended, "")
        await self._cancel()
        self.requests.clear()
        self.at_stop.clear()
        self._sent = self._unary = 0
        self._before = await asyncio.to_thread(self._wait_until_idle)
        return losses

    async def _cancel(self) -> None:
        for request in self.requests:
            request.task.cancel()
        await asyncio.gather(*(request.task for request in self.requests), return_exceptions=True)

    def _wait_until_idle(self) -> dict[str, float]:
        """Return the metrics once no request runs or waits: also unread and cancelled ones have ended."""
        deadline = time.monotonic() + _PATIENCE_S
        while any((now := self._metrics())[name] for name in _LOAD):
            if time.monotonic() > deadline:
                raise CellError(f"cancelled requests still run or wait after {_PATIENCE_S:g} s")
            time.sleep(_POLL_S)
        return now

    async def ends(self, within: float) -> tuple[Counter[Outcome], list[str]]:
        """Wait for every request's end; return the outcomes, and each that isn't permitted in a line."""
        tasks = [request.task for request in self.requests]
        if tasks:
            await asyncio.wait(tasks, timeout=within)
        return _outcomes(self.requests, f"no response {within:g} s after the stop")

    def client(self, protocol: Protocol, model: str = "llama") -> AsyncLlamaClient:
        """Return the scene's client of a model."""
        if (protocol, model) not in self._clients:
            url = self.addresses.http if protocol == "http" else self.addresses.grpc
            client = AsyncLlamaClient(url, protocol, model, timeout=_TIMEOUT_S)
            self._clients[protocol, model] = client
            self.closing.push_async_callback(client.close)
        return self._clients[protocol, model]

    def _generate(self, protocol: Protocol, model: str) -> tuple[str, Callable[..., Coroutine[Any, Any, Text]]]:
        async def generate(prompt: str, params: SamplingParams) -> Text:
            answer = await self.client(protocol, model).generate(prompt, params)
            return Text(answer.text, answer.finish_reason, answer.num_output_tokens)

        return f"{protocol} to {model}", generate

    def _stream(self, protocol: Protocol) -> tuple[str, Callable[..., Coroutine[Any, Any, Text]]]:
        async def stream(prompt: str, params: SamplingParams) -> Text:
            async with self.client(protocol).stream(prompt, params) as pieces:
                texts = [piece.text async for piece in pieces]
            whole = pieces.completion
            assert whole.text == "".join(texts)
            return Text(whole.text, whole.finish_reason, whole.num_output_tokens)

        return f"{protocol} stream", stream

    def _metrics(self) -> dict[str, float]:
        """Return llama's series by name, summed, and the requests in the queues of llama and llama_unary."""
        found: dict[str, float] = defaultdict(float)
        for (name, labels), value in metrics.series(metrics.text(self.addresses.metrics)).items():
            if name == PENDING or dict(labels).get("model", "llama") == "llama":
                found[name] += value
        return found


def _greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=1)


def _outcomes(requests: Iterable[Request], silence: str) -> tuple[Counter[Outcome], list[str]]:
    """Count the outcomes; return each that isn't permitted in a line. silence: of a request that hasn't ended."""
    outcomes: Counter[Outcome] = Counter()
    losses: dict[tuple[str, Outcome], list[str]] = {}
    for request in requests:
        if not request.task.done():
            end = End(Outcome.SILENT if Outcome.SILENT in request.permitted else Outcome.LOST, silence)
        else:
            end = End(Outcome.CANCELLED) if request.task.cancelled() else request.task.result()
        outcomes[end.outcome] += 1
        if end.outcome not in request.permitted:
            losses.setdefault((request.name, end.outcome), []).append(end.detail)
    return outcomes, [
        f"{len(details)} x {name} {outcome}, the first: {details[0]}" for (name, outcome), details in losses.items()
    ]
