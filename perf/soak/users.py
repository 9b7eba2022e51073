"""The users of a soak: every turn of one is an action of some kind.

Users complete and stream texts over HTTP and gRPC, read streams slowly, abandon streams, cancel, violate the contract,
repeat the one request whose text is known, disconnect and connect again; and they ask with the clients of others.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import openai
from triton_llama import AsyncLlamaClient, Completion, RejectedInputError, SamplingParams, TritonLlamaError
from triton_llama.endpoint import Protocol

from perf.soak import clients
from perf.soak.clients import Addresses
from perf.soak.libraries import LIBRARIES, Library, LibraryError
from perf.soak.tally import Answer, Tally
from perf.soak.workload import FIXED, FIXED_PROMPT, INVALID, LONG, params, plain_params, prompt

REQUEST_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 30.0

FAULTS = (TritonLlamaError, LibraryError, *clients.FAULTS)
"""What an action may raise; each is counted as an error."""

_AFTER_ERROR_S = 0.5
"""A user's pause after an error: retries against a dead server would be a load of their own."""
_MOST_CHUNKS_BEFORE_LEAVING = 8
_LONGEST_WAIT_BEFORE_CANCELLING_S = 0.5
_LONGEST_PAUSE_S = 4.0
_PAUSE_SHARE = 0.02
"""A slow reader's pauses, and after which share of the chunks it makes one."""

_SHARES = {
    "complete": 30,
    "stream": 15,
    "slow": 6,
    "leave": 8,
    "cancel": 6,
    "bad": 8,
    "fixed": 12,
    "reconnect": 6,
    "raw": 4,
    "tritonclient": 8,
    "openai": 8,
    "openai_leave": 3,
    **dict.fromkeys(LIBRARIES, 3),
}
_STREAMING = ("stream", "slow", "leave", "openai_leave")

Phase = Literal["steady", "burst", "rest", "over"]
Some = TypeVar("Some", bound=Answer | None)


def kinds(streams: bool, libraries: Sequence[str]) -> list[str]:
    """Return the kinds of actions. streams: whether the config streams; libraries: those that are installed."""
    missing = set(LIBRARIES) - set(libraries) | (set() if streams else set(_STREAMING))
    return [kind for kind in _SHARES if kind not in missing]


class Phases:
    """The present phase of the load. thinking_seconds: mean pause of a user before an action in the steady phase."""

    def __init__(self, thinking_seconds: float) -> None:
        self.phase: Phase = "rest"
        self._thinking_seconds = thinking_seconds
        self._active = asyncio.Event()

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
                await asyncio.sleep(randomness.expovariate(1 / self._thinking_seconds))
            # The phase may have changed during the pause.
            if self.phase != "rest":
                return self.phase != "over"


@dataclass
class User:
    """One user. fixed_text: the fixed request's due text. kinds: of its actions. libraries: shared by all users."""

    at: Addresses
    kinds: Sequence[str]
    libraries: Mapping[str, Library]
    randomness: random.Random
    tally: Tally
    fixed_text: str
    phases: Phases
    _clients: dict[Protocol, AsyncLlamaClient] = field(default_factory=dict)
    _openai: openai.AsyncOpenAI | None = None

    async def turn(self) -> bool:
        """Wait for the phase to permit it, and act; return False once the load is over."""
        if not await self.phases.wait(self.randomness):
            await self.disconnect()
            return False
        (kind,) = self.randomness.choices(self.kinds, [_SHARES[kind] for kind in self.kinds])
        self.tally.busy += 1
        try:
            await self._act(kind)
        except FAULTS as error:
            self.tally.fail(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(_AFTER_ERROR_S)
        finally:
            self.tally.busy -= 1
            self.tally.done[kind] += 1
        return True

    async def _act(self, kind: str) -> None:
        text, plain, some = prompt(self.randomness), plain_params(self.randomness), params(self.randomness)
        streamed = self.at.streams and self.randomness.random() < 0.5
        chunks = self.randomness.randint(1, _MOST_CHUNKS_BEFORE_LEAVING)
        match kind:
            case "complete":
                await self._count(some, self.client().generate(text, some))
            case "stream":
                await self._count(some, self._read(text, some))
            case "slow":
                await self._count(LONG, self._read(text, LONG, pauses=True))
            case "leave":
                await self._count(LONG, self._read(text, LONG, chunks=chunks))
            case "cancel":
                await self._cancel(text)
            case "bad":
                await self._violate(text)
            case "fixed":
                await self._repeat(streamed)
            case "reconnect":
                await self.disconnect()
            case "raw":
                await self._count(plain, clients.raw(self.at, text, plain, streamed))
            case "tritonclient":
                library = self.randomness.choice(clients.TRITON)
                await self._count(plain, clients.infer(library, self.at, text, plain))
            case "openai":
                ask = clients.openai_chat if streamed else clients.openai_completion
                await self._count(plain, ask(self.openai_client(), self.at.served_name, text, plain))
            case "openai_leave":
                chat = clients.openai_chat(self.openai_client(), self.at.served_name, text, LONG, chunks)
                await self._count(LONG, chat)
            case _:
                assert plain.max_tokens is not None
                assert plain.temperature is not None
                # The libraries have no parameter for the fewest tokens.
                asked = SamplingParams(max_tokens=plain.max_tokens, min_tokens=0)
                ask_library = self.libraries[kind].ask
                await self._count(asked, ask_library(text, plain.max_tokens, plain.temperature, streamed))

    async def _count(self, asked: SamplingParams, answer: Awaitable[Some]) -> Some:
        """Wait for an answer and count it; without one the request was left."""
        began = time.perf_counter()
        found = await answer
        if found is None:
            self.tally.leave()
        else:
            self.tally.complete(found, asked, time.perf_counter() - began)
        return found

    async def _read(
        self, text: str, asked: SamplingParams, pauses: bool = False, chunks: int | None = None
    ) -> Completion | None:
        """Stream; after that many chunks leave and return None, if the answer goes on.

        pauses: of seconds, before the first chunk and between others.
        """
        async with self.client().stream(text, asked) as stream:
            if pauses:
                await self._pause()
            async for chunk in stream:
                if pauses and self.randomness.random() < _PAUSE_SHARE:
                    await self._pause()
                if chunks is not None and not chunk.finish_reason and (chunks := chunks - 1) <= 0:
                    return None
        return stream.completion

    async def _pause(self) -> None:
        await asyncio.sleep(self.randomness.uniform(0, _LONGEST_PAUSE_S))

    async def _cancel(self, text: str) -> None:
        """Send a long request and cancel it. Over plain HTTP the server doesn't notice, and completes it."""
        request = asyncio.create_task(self._count(LONG, self.client().generate(text, LONG)))
        try:
            await asyncio.wait([request], timeout=self.randomness.uniform(0, _LONGEST_WAIT_BEFORE_CANCELLING_S))
        finally:
            request.cancel()
            await asyncio.wait([request])
        if request.cancelled():
            self.tally.leave()
        else:
            request.result()

    async def _violate(self, text: str) -> None:
        try:
            await self.client().generate(text, self.randomness.choice(INVALID))
        except RejectedInputError:
            self.tally.counts["refused"] += 1
        else:
            self.tally.fail("bad: a request that violates the contract was answered")

    async def _repeat(self, streamed: bool) -> None:
        client = self.client()
        found = await self._count(
            FIXED, self._read(FIXED_PROMPT, FIXED) if streamed else client.generate(FIXED_PROMPT, FIXED)
        )
        assert found is not None
        self.tally.same += found.text == self.fixed_text
        self.tally.different += found.text != self.fixed_text

    async def disconnect(self) -> None:
        """Close all connections; the next action opens new ones."""
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()
        if self._openai is not None:
            closing, self._openai = self._openai, None
            await closing.close()

    def client(self, given: Protocol | None = None) -> AsyncLlamaClient:
        """Return the user's client of this protocol, or of any."""
        protocol: Protocol = self.randomness.choice(("http", "grpc")) if given is None else given
        if protocol not in self._clients:
            url = self.at.http if protocol == "http" else self.at.grpc
            self._clients[protocol] = connect(url, protocol)
        return self._clients[protocol]

    def openai_client(self) -> openai.AsyncOpenAI:
        """Return the user's client of the OpenAI endpoint."""
        if self._openai is None:
            self._openai = openai.AsyncOpenAI(
                base_url=self.at.openai, api_key="unused", max_retries=0, timeout=REQUEST_TIMEOUT_S
            )
        return self._openai


def connect(url: str, protocol: Protocol = "http") -> AsyncLlamaClient:
    """Return a client with the soak's timeouts. url: host:port."""
    return AsyncLlamaClient(url, protocol, timeout=REQUEST_TIMEOUT_S, connect_timeout=CONNECT_TIMEOUT_S)
