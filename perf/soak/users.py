"""The users of a soak: sessions of `perf.load`, in which every turn is an action of some kind.

Users complete and stream texts over HTTP and gRPC, read streams slowly, abandon streams, cancel, violate the contract,
repeat the one request whose text is known, disconnect and connect again; and they ask with the clients of others.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import openai
from triton_llama import AsyncLlamaClient, Completion, RejectedInputError, SamplingParams, TritonLlamaError
from triton_llama.endpoint import Protocol

from perf.soak import clients
from perf.soak.clients import Addresses
from perf.soak.libraries import LIBRARIES, Library, LibraryError
from perf.soak.phases import Phases
from perf.soak.tally import Tally
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
_STREAMING = ("stream", "slow", "leave")
_OF_THE_ENDPOINT = ("openai", "openai_leave", *LIBRARIES)


def kinds(streams: bool, endpoint: bool = False, libraries: Sequence[str] = ()) -> list[str]:
    """Return the kinds of actions. streams: whether the config streams; libraries: those that are installed."""

    def possible(kind: str) -> bool:
        if kind in _OF_THE_ENDPOINT and not endpoint:
            return False
        return (streams or kind not in _STREAMING) and (kind not in LIBRARIES or kind in libraries)

    return [kind for kind in _SHARES if possible(kind)]


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
        actions: dict[str, Callable[[], Awaitable[object]]] = {
            "complete": lambda: self._ask(prompt(self.randomness), params(self.randomness), streamed=False),
            "stream": lambda: self._ask(prompt(self.randomness), params(self.randomness), streamed=True),
            "slow": self._read_slowly,
            "leave": self._leave,
            "cancel": self._cancel,
            "bad": self._violate,
            "fixed": self._repeat,
            "reconnect": self.disconnect,
            "raw": self._ask_raw,
            "tritonclient": self._ask_tritonclient,
            "openai": self._ask_openai,
            "openai_leave": self._leave_openai,
        }
        for library in self.libraries.values():
            actions[library.name] = lambda library=library: self._ask_library(library)  # type: ignore[misc]  # a default binds it
        (kind,) = self.randomness.choices(self.kinds, [_SHARES[kind] for kind in self.kinds])
        self.tally.busy += 1
        try:
            await actions[kind]()
        except FAULTS as error:
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
        if self._openai is not None:
            closing, self._openai = self._openai, None
            await closing.close()

    async def _ask(self, text: str, asked: SamplingParams, streamed: bool) -> Completion:
        began = time.perf_counter()
        if streamed:
            async with self.client().stream(text, asked) as stream:
                async for _ in stream:
                    pass
            completion = stream.completion
        else:
            completion = await self.client().generate(text, asked)
        self.tally.complete(completion, asked, time.perf_counter() - began)
        return completion

    async def _read_slowly(self) -> None:
        """Read a long stream with pauses of seconds, before the first chunk and between others."""
        began = time.perf_counter()
        async with self.client().stream(prompt(self.randomness), LONG) as stream:
            await self._pause()
            async for _ in stream:
                if self.randomness.random() < _PAUSE_SHARE:
                    await self._pause()
        # Its latency is its own; the length is checked.
        self.tally.complete(stream.completion, LONG, time.perf_counter() - began)

    async def _pause(self) -> None:
        await asyncio.sleep(self.randomness.uniform(0, _LONGEST_PAUSE_S))

    async def _leave(self) -> None:
        """Read some chunks of a long stream, and close it."""
        began = time.perf_counter()
        chunks = self.randomness.randint(1, _MOST_CHUNKS_BEFORE_LEAVING)
        ended = False
        async with self.client().stream(prompt(self.randomness), LONG) as stream:
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
            await self.client().generate(prompt(self.randomness), self.randomness.choice(INVALID))
        except RejectedInputError:
            self.tally.refused += 1
        else:
            self.tally.fail("bad: a request that violates the contract was answered")

    async def _repeat(self) -> None:
        streamed = self.at.streams and self.randomness.random() < 0.5
        completion = await self._ask(FIXED_PROMPT, FIXED, streamed)
        self.tally.same += completion.text == self.fixed_text
        self.tally.different += completion.text != self.fixed_text

    async def _ask_raw(self) -> None:
        streamed = self.at.streams and self.randomness.random() < 0.5
        await self._ask_once(clients.raw_stream if streamed else clients.raw_generate)

    async def _ask_tritonclient(self) -> None:
        await self._ask_once(self.randomness.choice(clients.TRITON))

    async def _ask_once(self, ask: clients.Ask) -> None:
        asked, began = plain_params(self.randomness), time.perf_counter()
        answer = await ask(self.at, prompt(self.randomness), asked)
        self.tally.complete(answer, asked, time.perf_counter() - began)

    async def _ask_openai(self) -> None:
        asked, began = plain_params(self.randomness), time.perf_counter()
        ask = self.randomness.choice((clients.openai_completion, clients.openai_chat))
        answer = await ask(self.openai_client(), self.at.served_name, prompt(self.randomness), asked)
        assert answer is not None
        self.tally.complete(answer, asked, time.perf_counter() - began)

    async def _leave_openai(self) -> None:
        """Read some chunks of a long chat, and close its stream."""
        began = time.perf_counter()
        chunks = self.randomness.randint(1, _MOST_CHUNKS_BEFORE_LEAVING)
        name, text = self.at.served_name, prompt(self.randomness)
        answer = await clients.openai_chat(self.openai_client(), name, text, LONG, chunks)
        if answer is None:
            self.tally.leave()
        else:
            self.tally.complete(answer, LONG, time.perf_counter() - began)

    async def _ask_library(self, library: Library) -> None:
        chosen = plain_params(self.randomness)
        # The libraries have no parameter for the fewest tokens.
        asked = SamplingParams(max_tokens=chosen.max_tokens, min_tokens=0, temperature=chosen.temperature)
        assert asked.max_tokens is not None
        assert asked.temperature is not None
        streamed, began = self.randomness.random() < 0.5, time.perf_counter()
        answer = await library.ask(prompt(self.randomness), asked.max_tokens, asked.temperature, streamed)
        self.tally.complete(answer, asked, time.perf_counter() - began)

    def client(self, given: Protocol | None = None) -> AsyncLlamaClient:
        """Return the user's client of this protocol, or of any."""
        protocol: Protocol = self.randomness.choice(("http", "grpc")) if given is None else given
        if protocol not in self._clients:
            self._clients[protocol] = connect(self.at.http if protocol == "http" else self.at.grpc, protocol)
        return self._clients[protocol]

    def openai_client(self) -> openai.AsyncOpenAI:
        """Return the user's client of the OpenAI endpoint."""
        if self._openai is None:
            assert self.at.openai is not None
            self._openai = openai.AsyncOpenAI(
                base_url=self.at.openai, api_key="unused", max_retries=0, timeout=REQUEST_TIMEOUT_S
            )
        return self._openai


def connect(url: str, protocol: Protocol = "http") -> AsyncLlamaClient:
    """Return a client with the soak's timeouts. url: host:port."""
    return AsyncLlamaClient(url, protocol, timeout=REQUEST_TIMEOUT_S, connect_timeout=CONNECT_TIMEOUT_S)
