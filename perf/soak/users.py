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

_SHARES = {"complete": 40, "stream": 20, "leave": 8, "cancel": 6, "bad": 8, "fixed": 12, "reconnect": 6}
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

    def complete(self, completion: Completion, asked: SamplingParams, seconds: float) -> None:
        """Count an answer, and check its length."""
        tokens = completion.num_output_tokens
        assert asked.max_tokens is not None
        assert asked.min_tokens is not None
        if not asked.min_tokens <= tokens <= asked.max_tokens:
            self.fail(f"{tokens} tokens came, {asked.min_tokens} to {asked.max_tokens} were asked for")
        self.completed[completion.finish_reason] += 1
        self.output_tokens += tokens
        self._latencies.append(seconds)

    def leave(self) -> None:
        """Count an abandoned request, a long one."""
        self.left += 1
        self.left_tokens += LONGEST_OUTPUT

    def fail(self, message: str) -> None:
        """Count an unexpected error."""
        message = " ".join(message.split())[:_MESSAGE_CHARACTERS]
        known = message in self.errors or len(self.errors) < MOST_MESSAGES
        self.errors[message if known else "other errors"] += 1

    def take_latencies(self) -> list[float]:
        """Return the seconds of the answers since the last call."""
        taken, self._latencies = self._latencies, []
        return taken


@dataclass
class Phases:
    """The present phase of the load. thinking_seconds: mean pause of a user before an action in the steady phase."""

    thinking_seconds: float
    phase: Phase = "rest"
    _active: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self, phase: Phase) -> None:
        """Begin a phase."""
        self.phase = phase
        if phase == "rest":
            self._active.clear()
        else:
            self._active.set()

    async def wait(self, randomness: random.Random) -> bool:
        """Wait until the user may act, and return True; False once the load is over."""
        while True:
            await self._active.wait()
            if self.phase == "steady":
                await asyncio.sleep(randomness.expovariate(1 / self.thinking_seconds))
            # The phase may have changed during the pause.
            if self.phase != "rest":
                return self.phase != "over"


@dataclass
class User:
    """One user. urls: host:port by protocol. fixed_text: the fixed request's due text."""

    urls: Mapping[Protocol, str]
    streams: bool
    randomness: random.Random
    tally: Tally
    fixed_text: str
    phases: Phases
    _clients: dict[Protocol, AsyncLlamaClient] = field(default_factory=dict)

    async def turn(self) -> bool:
        """Wait for the phase to permit it, and act; return False once the load is over."""
        if not await self.phases.wait(self.randomness):
            await self.disconnect()
            return False
        actions: Mapping[str, Callable[[], Awaitable[object]]] = {
            "complete": lambda: self._ask(prompt(self.randomness), params(self.randomness), streamed=False),
            "stream": lambda: self._ask(prompt(self.randomness), params(self.randomness), streamed=True),
            "leave": self._leave,
            "cancel": self._cancel,
            "bad": self._violate,
            "fixed": self._repeat,
            "reconnect": self.disconnect,
        }
        chosen = kinds(self.streams)
        (kind,) = self.randomness.choices(chosen, [_SHARES[kind] for kind in chosen])
        self.tally.busy += 1
        try:
            await actions[kind]()
        except TritonLlamaError as error:
            self.tally.fail(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(_AFTER_ERROR_S)
        finally:
            self.tally.busy -= 1
            self.tally.done[kind] += 1
        return True

    async def disconnect(self) -> None:
        """Close all connections; the next action opens new ones."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()

    async def _ask(self, text: str, asked: SamplingParams, streamed: bool) -> Completion:
        began = time.perf_counter()
        if streamed:
            async with self._client().stream(text, asked) as stream:
                async for _ in stream:
                    pass
            completion = stream.completion
        else:
            completion = await self._client().generate(text, asked)
        self.tally.complete(completion, asked, time.perf_counter() - began)
        return completion

    async def _leave(self) -> None:
        """Read some chunks of a long stream, and close it."""
        began = time.perf_counter()
        chunks = self.randomness.randint(1, _MOST_CHUNKS_BEFORE_LEAVING)
        ended = False
        async with self._client().stream(prompt(self.randomness), LONG) as stream:
            async for chunk in stream:
                ended = bool(chunk.finish_reason)
                chunks -= 1
                if not chunks:
                    break
        if ended:
            self.tally.complete(stream.completion, LONG, time.perf_counter() - began)
        else:
            self.tally.leave()

    async def _cancel(self) -> None:
        """Send a long request and cancel it. Over plain HTTP the server doesn't notice, and completes it."""
        request = asyncio.create_task(self._ask(prompt(self.randomness), LONG, streamed=False))
        try:
            await asyncio.wait([request], timeout=self.randomness.uniform(0, _LONGEST_WAIT_BEFORE_CANCELLING_S))
        finally:
            request.cancel()
            await asyncio.wait([request])
        if request.cancelled():
            self.tally.leave()
        else:
            request.result()

    async def _violate(self) -> None:
        try:
            await self._client().generate(prompt(self.randomness), self.randomness.choice(INVALID))
        except RejectedInputError:
            self.tally.refused += 1
        else:
            self.tally.fail("bad: a request that violates the contract was answered")

    async def _repeat(self) -> None:
        streamed = self.streams and self.randomness.random() < 0.5
        completion = await self._ask(FIXED_PROMPT, FIXED, streamed)
        self.tally.same += completion.text == self.fixed_text
        self.tally.different += completion.text != self.fixed_text

    def _client(self) -> AsyncLlamaClient:
        protocol: Protocol = self.randomness.choice(("http", "grpc"))
        if protocol not in self._clients:
            self._clients[protocol] = connect(self.urls[protocol], protocol)
        return self._clients[protocol]


def connect(url: str, protocol: Protocol = "http") -> AsyncLlamaClient:
    """Return a client with the soak's timeouts. url: host:port."""
    return AsyncLlamaClient(url, protocol, timeout=REQUEST_TIMEOUT_S, connect_timeout=CONNECT_TIMEOUT_S)
