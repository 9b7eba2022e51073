"""A server in a situation: the requests that it has accepted, and what became of them after a stop."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, Self

from server.metrics import PENDING
from server.stops.outcomes import Chunk, End, Expected, Outcome, end_of
from triton_llama import AsyncLlamaClient, SamplingParams
from triton_llama.endpoint import Protocol

from perf import metrics

PROMPT = "Return a list of"
TOKENS = 480
"""Of each request: about a second for 32 of them on two cores."""

ANSWERED = (Outcome.COMPLETE, Outcome.REFUSED)

_TIMEOUT_S = 120.0
"""Of a request: longer than the grace period and what follows it."""
_PATIENCE_S = 60.0
_POLL_S = 0.02
_MOST_UNARY = 32
"""Under way in llama_unary; more wait where no metric shows them."""


class CellError(AssertionError):
    """A situation that didn't come about, or a stop that didn't end; the message is one line."""


class NotTogetherError(CellError):
    """Requests had ended before all of a situation's were accepted: the demo model was too fast."""


class Addresses(NamedTuple):
    """host:port of each service."""

    http: str
    grpc: str
    metrics: str


class Request(NamedTuple):
    """A request that the server has accepted. permitted: the outcomes that are no loss."""

    name: str
    task: asyncio.Task[End]
    permitted: tuple[Outcome, ...]


class Scene:
    """One new server, entered before the situation and left after the stop.

    streams: whether the config streams (decoupled), with llama_unary beside. network_ends: as in Stop.
    at_stop: called when the stop begins. stopped: set once it is over.
    """

    def __init__(self, addresses: Addresses, streams: bool, network_ends: bool) -> None:
        self.addresses = addresses
        self.streams = streams
        self.network_ends = network_ends
        self.expected: Expected = {}
        self.at_stop: list[Callable[[], object]] = []
        self.stopped = asyncio.Event()
        self.requests: list[Request] = []
        self.closing = AsyncExitStack()
        self._unary = 0
        self._clients: dict[tuple[Protocol, str], AsyncLlamaClient] = {}

    async def __aenter__(self) -> Self:
        await self.closing.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        for request in self.requests:
            request.task.cancel()
        await asyncio.gather(*(request.task for request in self.requests), return_exceptions=True)
        await self.closing.aclose()

    def add(self, name: str, end: Coroutine[Any, Any, End], permitted: tuple[Outcome, ...] = ANSWERED) -> Request:
        """Send one request of one row; `wait_until_accepted` waits until the model or its queue has it."""
        request = Request(name, asyncio.create_task(end), permitted)
        self.requests.append(request)
        return request

    def ask(
        self,
        count: int,
        prompt: Callable[[int], str] = lambda _: PROMPT,
        tokens: int = TOKENS,
        permitted: tuple[Outcome, ...] = ANSWERED,
    ) -> list[Request]:
        """Send requests with the client library, in every way of the config: HTTP, gRPC, streams, llama_unary."""
        protocols: tuple[Protocol, ...] = ("http", "grpc")
        params = SamplingParams(max_tokens=tokens, min_tokens=tokens, seed=1)
        sent = []
        for number in range(count):
            text, protocol = prompt(number), protocols[number % 2]
            if self.streams and (number % 4 > 1 or self._unary == _MOST_UNARY):
                name, chunks = f"{protocol} stream", self._stream(protocol, text, params)
            else:
                self._unary += 1
                model = "llama_unary" if self.streams else "llama"
                name, chunks = f"{protocol} to {model}", self._generate(protocol, model, text, params)
            sent.append(self.add(name, end_of(chunks, self.expected, text, tokens), permitted))
        return sent

    async def wait_until_accepted(self, running: int = 0, waiting: int = 0) -> tuple[int, int]:
        """Wait until all that was sent has reached the model or its queue; return how many run and wait.

        running, waiting: how many at least. Raises NotTogetherError if that can't be any more, CellError if it isn't.
        """
        # Not in the event loop, which reads streams and may be busy for seconds.
        return await asyncio.to_thread(self._wait_until_accepted, running, waiting)

    def _wait_until_accepted(self, least_running: int, least_waiting: int) -> tuple[int, int]:
        deadline = time.monotonic() + _PATIENCE_S
        sent = len(self.requests)
        while True:
            now = self._metrics()
            running, waiting = int(now["llama_slots_in_use"]), int(now["llama_waiting_rows"] + now[PENDING])
            ended = int(now["llama_requests_total"])
            if ended + running + waiting >= sent and running >= least_running and waiting >= least_waiting:
                return running, waiting
            if time.monotonic() > deadline or ended == sent != 0:
                raise (NotTogetherError if ended else CellError)(
                    f"{running} run, {waiting} wait and {ended} of {sent} have ended, instead of "
                    f"{least_running or 'any'} and {least_waiting or 'any'}"
                )
            time.sleep(_POLL_S)

    async def ends(self, within: float) -> tuple[Counter[Outcome], list[str]]:
        """Wait for every request's end; return the outcomes, and each that isn't permitted in a line."""
        if self.requests:
            await asyncio.wait([request.task for request in self.requests], timeout=within)
        return outcomes(self.requests, f"no response {within:g} s after the stop")

    def lost(self) -> list[str]:
        """Return each request that has ended already as it must not, in a line."""
        return outcomes([request for request in self.requests if request.task.done()], "")[1]

    def _client(self, protocol: Protocol, model: str) -> AsyncLlamaClient:
        if (protocol, model) not in self._clients:
            url = self.addresses.http if protocol == "http" else self.addresses.grpc
            client = AsyncLlamaClient(url, protocol, model, timeout=_TIMEOUT_S)
            self._clients[protocol, model] = client
            self.closing.push_async_callback(client.close)
        return self._clients[protocol, model]

    async def _generate(self, protocol: Protocol, model: str, prompt: str, params: SamplingParams) -> list[Chunk]:
        answer = await self._client(protocol, model).generate(prompt, params)
        return [(answer.text, answer.finish_reason, answer.num_output_tokens)]

    async def _stream(self, protocol: Protocol, prompt: str, params: SamplingParams) -> list[Chunk]:
        async with self._client(protocol, "llama").stream(prompt, params) as pieces:
            return [(piece.text, piece.finish_reason, piece.num_output_tokens) async for piece in pieces]

    def _metrics(self) -> dict[str, float]:
        """Return llama's series by name, summed, and the requests in the queues of llama and llama_unary."""
        found: dict[str, float] = defaultdict(float)
        for (name, labels), value in metrics.series(metrics.text(self.addresses.metrics)).items():
            if name == PENDING or dict(labels).get("model", "llama") == "llama":
                found[name] += value
        return found


def outcomes(requests: Iterable[Request], silence: str) -> tuple[Counter[Outcome], list[str]]:
    """Count the outcomes; return each that isn't permitted in a line. silence: of a request that hasn't ended."""
    counts: Counter[Outcome] = Counter()
    losses: dict[tuple[str, Outcome], list[str]] = {}
    for name, task, permitted in requests:
        if not task.done():
            outcome, detail = Outcome.SILENT if Outcome.SILENT in permitted else Outcome.LOST, silence
        else:
            outcome, detail = (Outcome.CANCELLED, "") if task.cancelled() else task.result()
        counts[outcome] += 1
        if outcome not in permitted:
            losses.setdefault((name, outcome), []).append(detail)
    return counts, [
        f"{len(details)} x {name} {outcome}, the first: {details[0]}" for (name, outcome), details in losses.items()
    ]
