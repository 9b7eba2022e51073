"""The users of a soak: sessions of `perf.load`, in which every turn is an action of some kind, and their tally.

Users complete and stream texts over HTTP and gRPC, abandon streams, cancel, violate the contract, repeat the one
request whose text is known, disconnect and connect again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from triton_llama import AsyncLlamaClient, Completion, RejectedInputError, SamplingParams, TritonLlamaError
from triton_llama.endpoint import Protocol

from perf.soak.workload import FIXED, FIXED_PROMPT, INVALID, LONG, LONGEST_OUTPUT, params, prompt

REQUEST_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 30.0
MOST_MESSAGES = 50
"""Different error messages that are kept; all are counted."""

Phase = Literal["steady", "burst", "rest", "over"]

_AFTER_ERROR_S = 0.5
"""A user's pause after an error: retries against a dead server would be a load of their own."""
_MESSAGE_CHARACTERS = 300
_MOST_CHUNKS_BEFORE_LEAVING = 8
_LONGEST_WAIT_BEFORE_CANCELLING_S = 0.5

_SHARES: Mapping[str, int] = {
    "complete": 40, "stream": 20, "leave": 8, "cancel": 6, "bad": 8, "fixed": 12, "reconnect": 6,
}  # fmt: skip
_STREAMING = ("stream", "leave")


def kinds(streams: bool) -> list[str]:
    """Return the kinds of actions; streams: whether the config streams."""
    return [kind for kind in _SHARES if streams or kind not in _STREAMING]


@dataclass
class Tally:
    """Counts since the soak began.

    done: actions by kind. completed: answers by finish_reason; output_tokens: theirs. left: abandoned requests, which
    the server may have completed all the same; left_tokens: what they had asked for. refused: invalid requests that
    were refused. same, different: texts of the fixed request. errors: unexpected ones, by message. busy: users that
    wait for an answer now.
    """

    done: Counter[str] = field(default_factory=Counter)
    completed: Counter[str] = field(default_factory=Counter)
    output_tokens: int = 0
    left: int = 0
    left_tokens: int = 0
    refused: int = 0
    same: int = 0
    different: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    busy: int = 0
    _latencies: list[float] = field(default_factory=list)

    def complete(self, finish_reason: str, tokens: int, seconds: float) -> None:
        """Count an answer."""
        self.completed[finish_reason] += 1
        self.output_tokens += tokens
        self._latencies.append(seconds)

    def leave(self, tokens: int) -> None:
        """Count an abandoned request."""
        self.left += 1
        self.left_tokens += tokens

    def fail(self, message: str) -> None:
        """Count an unexpected error."""
        message = " ".join(message.split())[:_MESSAGE_CHARACTERS]
        known = message in self.errors or len(self.errors) < MOST_MESSAGES
        self.errors[message if known else "other errors"] += 1

    def take_latencies(self) -> list[float]:
        """Return the seconds of the answers since the last call."""
        taken, self._latencies = self._latencies, []
        return taken


class Phases:
    """The present phase of the load, initially a rest, and the users that wait for it to change."""

    def __init__(self, thinking_seconds: float) -> None:
        """thinking_seconds: mean pause of a user before an action in the steady phase."""
        self._thinking = thinking_seconds
        self._phase: Phase = "rest"
        self._changed = asyncio.Condition()

    @property
    def phase(self) -> Phase:
        """The present phase."""
        return self._phase

    async def change(self, phase: Phase) -> None:
        """Begin a phase."""
        async with self._changed:
            self._phase = phase
            self._changed.notify_all()

    async def wait(self, randomness: random.Random) -> bool:
        """Wait until the user may act, and return True; False once the load is over."""
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._phase != "rest")
            if self._phase == "steady":
                await asyncio.sleep(randomness.expovariate(1 / self._thinking))
            # The phase may have changed during the pause.
            if self._phase != "rest":
                return self._phase != "over"


class User:
    """One user. urls: host:port by protocol. fixed_text: the fixed request's due text."""

    def __init__(
        self,
        urls: Mapping[Protocol, str],
        streams: bool,
        randomness: random.Random,
        tally: Tally,
        fixed_text: str,
        phases: Phases,
    ) -> None:
        self._urls = urls
        self._streams = streams
        self._randomness = randomness
        self._tally = tally
        self._fixed_text = fixed_text
        self._phases = phases
        self._clients: dict[Protocol, AsyncLlamaClient] = {}
        self._actions: Mapping[str, Callable[[], Awaitable[None]]] = {
            "complete": self._complete,
            "stream": self._stream,
            "leave": self._leave,
            "cancel": self._cancel,
            "bad": self._violate,
            "fixed": self._repeat,
            "reconnect": self.disconnect,
        }

    async def turn(self) -> bool:
        """Wait for the phase to permit it, and act; return False once the load is over."""
        if not await self._phases.wait(self._randomness):
            await self.disconnect()
            return False
        chosen = kinds(self._streams)
        (kind,) = self._randomness.choices(chosen, [_SHARES[kind] for kind in chosen])
        self._tally.busy += 1
        try:
            await self._actions[kind]()
        except TritonLlamaError as error:
            self._tally.fail(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(_AFTER_ERROR_S)
        finally:
            self._tally.busy -= 1
            self._tally.done[kind] += 1
        return True

    async def disconnect(self) -> None:
        """Close all connections; the next action opens new ones."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()

    async def _complete(self) -> None:
        asked, began = params(self._randomness), time.perf_counter()
        self._count(await self._client().generate(prompt(self._randomness), asked), asked, began)

    async def _stream(self) -> None:
        asked, began = params(self._randomness), time.perf_counter()
        self._count(await self._streamed(prompt(self._randomness), asked), asked, began)

    async def _leave(self) -> None:
        """Read some chunks of a long stream, and close it."""
        began = time.perf_counter()
        chunks = self._randomness.randint(1, _MOST_CHUNKS_BEFORE_LEAVING)
        ended = False
        async with self._client().stream(prompt(self._randomness), LONG) as stream:
            async for chunk in stream:
                ended = bool(chunk.finish_reason)
                chunks -= 1
                if not chunks:
                    break
        if ended:
            self._count(stream.completion, LONG, began)
        else:
            self._tally.leave(LONGEST_OUTPUT)

    async def _cancel(self) -> None:
        """Send a long request and cancel it. Over plain HTTP the server doesn't notice, and completes it."""
        began = time.perf_counter()
        request = asyncio.create_task(self._client().generate(prompt(self._randomness), LONG))
        try:
            await asyncio.wait([request], timeout=self._randomness.uniform(0, _LONGEST_WAIT_BEFORE_CANCELLING_S))
        finally:
            request.cancel()
            await asyncio.wait([request])
        if request.cancelled():
            self._tally.leave(LONGEST_OUTPUT)
        else:
            self._count(request.result(), LONG, began)

    async def _violate(self) -> None:
        try:
            await self._client().generate(prompt(self._randomness), self._randomness.choice(INVALID))
        except RejectedInputError:
            self._tally.refused += 1
        else:
            self._tally.fail("bad: a request that violates the contract was answered")

    async def _repeat(self) -> None:
        began = time.perf_counter()
        if self._streams and self._randomness.random() < 0.5:
            completion = await self._streamed(FIXED_PROMPT, FIXED)
        else:
            completion = await self._client().generate(FIXED_PROMPT, FIXED)
        self._count(completion, FIXED, began)
        self._tally.same += completion.text == self._fixed_text
        self._tally.different += completion.text != self._fixed_text

    async def _streamed(self, text: str, asked: SamplingParams) -> Completion:
        async with self._client().stream(text, asked) as stream:
            async for _ in stream:
                pass
        return stream.completion

    def _client(self) -> AsyncLlamaClient:
        protocol: Protocol = self._randomness.choice(("http", "grpc"))
        if protocol not in self._clients:
            self._clients[protocol] = connect(self._urls[protocol], protocol)
        return self._clients[protocol]

    def _count(self, completion: Completion, asked: SamplingParams, began: float) -> None:
        """Count an answer, and check its length."""
        tokens = completion.num_output_tokens
        assert asked.max_tokens is not None
        assert asked.min_tokens is not None
        if not asked.min_tokens <= tokens <= asked.max_tokens:
            self._tally.fail(f"{tokens} tokens came, {asked.min_tokens} to {asked.max_tokens} were asked for")
        self._tally.complete(completion.finish_reason, tokens, time.perf_counter() - began)


def connect(url: str, protocol: Protocol = "http") -> AsyncLlamaClient:
    """Return a client with the soak's timeouts. url: host:port."""
    return AsyncLlamaClient(url, protocol, timeout=REQUEST_TIMEOUT_S, connect_timeout=CONNECT_TIMEOUT_S)
