"""The users of a soak: each does one thing after another, of many kinds, and says in the tally what came of it.

Complete and stream texts over HTTP and gRPC, leave streams early, cancel, break the contract, repeat the one request
whose text is known, hang up and connect again. Knows the client library, and nothing of the server behind it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping

from triton_llama import AsyncLlamaClient, Completion, RejectedInputError, SamplingParams, TritonLlamaError
from triton_llama.endpoint import Protocol

from perf.soak.prompts import BAD, FIXED, FIXED_PROMPT, LONGEST_OUTPUT, params, prompt
from perf.soak.tally import Tally
from perf.soak.weather import Weather

REQUEST_TIMEOUT_S = 120.0
CONNECT_TIMEOUT_S = 30.0

_AFTER_ERROR_S = 0.5
"""A user who met an error waits: against a server that is gone, the errors would be the load."""

_MOST_PIECES_BEFORE_LEAVING = 8
_LONGEST_WAIT_BEFORE_CANCELLING_S = 0.5

# How often each kind is done, and which of them need a config that streams.
_SHARES: Mapping[str, int] = {
    "complete": 40,
    "stream": 20,
    "leave": 8,
    "cancel": 6,
    "bad": 8,
    "fixed": 12,
    "reconnect": 6,
}
_STREAMING = ("stream", "leave")


def kinds(streams: bool) -> list[str]:
    """Return what users do of a server that streams, or doesn't."""
    return [kind for kind in _SHARES if streams or kind not in _STREAMING]


class User:
    """One of them. urls: host:port by protocol. streams: whether the server does. fixed_text: what must always come."""

    def __init__(
        self, urls: Mapping[Protocol, str], streams: bool, randomness: random.Random, tally: Tally, fixed_text: str
    ) -> None:
        self._urls = urls
        self._streams = streams
        self._randomness = randomness
        self._tally = tally
        self._fixed_text = fixed_text
        self._clients: dict[Protocol, AsyncLlamaClient] = {}
        self._does: Mapping[str, Callable[[], Awaitable[None]]] = {
            "complete": self._complete,
            "stream": self._stream,
            "leave": self._leave,
            "cancel": self._cancel,
            "bad": self._ask_badly,
            "fixed": self._ask_the_fixed,
            "reconnect": self._hang_up,
        }

    async def live(self, weather: Weather) -> None:
        """Act whenever the weather lets one, until it is over."""
        chosen = kinds(self._streams)
        shares = [_SHARES[kind] for kind in chosen]
        try:
            while await weather.lets_act(self._randomness):
                (kind,) = self._randomness.choices(chosen, shares)
                await self._act(kind)
        finally:
            await self._hang_up()

    async def _act(self, kind: str) -> None:
        self._tally.busy += 1
        try:
            await self._does[kind]()
        except TritonLlamaError as error:
            self._tally.fail(f"{kind}: {type(error).__name__}: {error}")
            await asyncio.sleep(_AFTER_ERROR_S)
        finally:
            self._tally.busy -= 1
            self._tally.done[kind] += 1

    async def _complete(self) -> None:
        asked, began = params(self._randomness), time.perf_counter()
        self._take(await self._client().generate(prompt(self._randomness), asked), asked, began)

    async def _stream(self) -> None:
        asked, began = params(self._randomness), time.perf_counter()
        async with self._client().stream(prompt(self._randomness), asked) as stream:
            async for _ in stream:
                pass
        self._take(stream.completion, asked, began)

    async def _leave(self) -> None:
        """Read some pieces of a long stream, and close it."""
        asked, began = self._long(), time.perf_counter()
        pieces = self._randomness.randint(1, _MOST_PIECES_BEFORE_LEAVING)
        ended = False
        async with self._client().stream(prompt(self._randomness), asked) as stream:
            async for piece in stream:
                ended = bool(piece.finish_reason)
                pieces -= 1
                if not pieces:
                    break
        if ended:
            self._take(stream.completion, asked, began)
        else:
            self._tally.leave(LONGEST_OUTPUT)

    async def _cancel(self) -> None:
        """Send a long request and take it back. Over plain HTTP the server isn't told, and completes it."""
        asked, began = self._long(), time.perf_counter()
        asking = asyncio.create_task(self._client().generate(prompt(self._randomness), asked))
        try:
            await asyncio.wait([asking], timeout=self._randomness.uniform(0, _LONGEST_WAIT_BEFORE_CANCELLING_S))
        finally:
            asking.cancel()
            await asyncio.wait([asking])
        if asking.cancelled():
            self._tally.leave(LONGEST_OUTPUT)
        else:
            self._take(asking.result(), asked, began)

    async def _ask_badly(self) -> None:
        try:
            await self._client().generate(prompt(self._randomness), self._randomness.choice(BAD))
        except RejectedInputError:
            self._tally.refused += 1
        else:
            self._tally.fail("bad: a request that breaks the contract was answered")

    async def _ask_the_fixed(self) -> None:
        began = time.perf_counter()
        if self._streams and self._randomness.random() < 0.5:
            async with self._client().stream(FIXED_PROMPT, FIXED) as stream:
                async for _ in stream:
                    pass
            completion = stream.completion
        else:
            completion = await self._client().generate(FIXED_PROMPT, FIXED)
        self._take(completion, FIXED, began)
        self._tally.compare(completion.text == self._fixed_text)

    async def _hang_up(self) -> None:
        while self._clients:
            _, client = self._clients.popitem()
            await client.close()

    def _client(self) -> AsyncLlamaClient:
        protocol: Protocol = self._randomness.choice(("http", "grpc"))
        if protocol not in self._clients:
            self._clients[protocol] = AsyncLlamaClient(
                self._urls[protocol], protocol, timeout=REQUEST_TIMEOUT_S, connect_timeout=CONNECT_TIMEOUT_S
            )
        return self._clients[protocol]

    def _long(self) -> SamplingParams:
        return SamplingParams(max_tokens=LONGEST_OUTPUT, min_tokens=LONGEST_OUTPUT, temperature=0.9)

    def _take(self, completion: Completion, asked: SamplingParams, began: float) -> None:
        """Count an answer, and look whether it is as long as it was asked for."""
        tokens = completion.num_output_tokens
        assert asked.max_tokens is not None
        assert asked.min_tokens is not None
        if not asked.min_tokens <= tokens <= asked.max_tokens:
            self._tally.fail(f"{tokens} tokens came, {asked.min_tokens} to {asked.max_tokens} were asked for")
        self._tally.complete(completion.finish_reason, tokens, time.perf_counter() - began)


async def ask_the_fixed(url: str) -> str:
    """Return the text of the fixed request. url: host:port over HTTP."""
    async with AsyncLlamaClient(url, timeout=REQUEST_TIMEOUT_S, connect_timeout=CONNECT_TIMEOUT_S) as client:
        return (await client.generate(FIXED_PROMPT, FIXED)).text
