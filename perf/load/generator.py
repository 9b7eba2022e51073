"""`drive`: put a server under load, on asyncio and aiohttp, and return what happened to the requests.

A closed loop, or an open one with `arrivals`: each of `concurrency` users sends its next request when the last one is
answered, until none is left. A chat is one user's, turn after turn; a turn's prompt has the server's answers to the
turns before it. The warm-up's requests are the first of the same sequence, so that the measured ones meet a busy
server.

Every request has a connection of its own, because a server may close a kept one just when it is used again. There are
no retries: every failure is in its record. The generator takes 50 µs of the processors' time per streamed event, the
same for every server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import aiohttp

from perf.load.protocols import Request, Target, body, path, read_answer
from perf.load.records import TIME_OVER, Record, Run


def drive(
    target: Target,
    requests: Sequence[Request],
    concurrency: int,
    warmup: int,
    timeout: float,
    seconds: float | None = None,
) -> Run:
    """Send the requests in one sequence; the first `warmup` are recorded but not measured.

    `seconds`: requests that would be sent later than that after the first measured one are no part of the run, but two
    measured ones are. `timeout`: seconds for all requests together; those not answered by then are recorded as errors,
    as is everything else that fails.
    """
    # A process of its own, so that the benchmark does not delay it; not a fork, which would copy torch's threads.
    with ProcessPoolExecutor(1, get_context("forkserver")) as process:
        records = process.submit(generate, target, requests, concurrency, timeout, warmup, seconds).result()
    return Run(concurrency, tuple(records), warmup)


def generate(
    target: Target,
    requests: Sequence[Request],
    concurrency: int,
    timeout: float,
    warmup: int = 0,
    seconds: float | None = None,
    arrivals: Sequence[float] | None = None,
) -> list[Record]:
    """Do the same in this process; return one record per request, in order.

    arrivals: the earliest second of each request. With as many users as requests the loop is open.
    """
    load = _Load(target, requests, timeout)
    asyncio.run(load.run(concurrency, warmup, seconds, arrivals))
    for chat in load.begun:
        # The turns before it were read when it was sent.
        load.read(chat[-1])
    return load.records[: load.begun[-1].stop]


class _Load:
    """A sequence of requests, sent to an idle server, until the last one is answered or the time is over.

    records: without the answers that are not read yet. begun: of each chat that was sent, the numbers
    of its requests.
    """

    def __init__(self, target: Target, requests: Sequence[Request], timeout: float) -> None:
        self._url = target.url + path(target)
        self._target = target
        self._requests = requests
        # Encoded beforehand: nothing but sending and receiving happens under load, except between the turns of a chat.
        self._bodies = [body(target, request) if request.turn == 1 else b"" for request in requests]
        self._timeout = timeout
        self.records = [Record(0.0, turn=request.turn) for request in requests]
        self._chunks: list[list[tuple[float, bytes]]] = [[] for _ in requests]
        firsts = [number for number, request in enumerate(requests) if request.turn == 1]
        self._chats = [range(*border) for border in zip(firsts, [*firsts[1:], len(requests)], strict=True)]
        self.begun: list[range] = []
        self._began = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def run(self, concurrency: int, warmup: int, seconds: float | None, arrivals: Sequence[float] | None) -> None:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
                headers={"Content-Type": "application/json"},
                # A server must not spend its time on compression.
                skip_auto_headers=["Accept-Encoding"],
            ) as client,
            asyncio.TaskGroup() as users,
        ):
            waiting = iter(self._chats)
            steady: float | None = None

            async def user() -> None:
                nonlocal steady
                # Since when the user is free: not now, as other users' answers may have been read since. With arrivals
                # from 0 on, so that a process that starts late delays none of them.
                free = self._now() if arrivals is None else 0.0
                for chat in waiting:
                    if arrivals is not None:
                        free = max(free, arrivals[chat[0]])
                        await asyncio.sleep(free - self._now())
                    steady = free if steady is None and chat[0] >= warmup else steady
                    late = seconds is not None and steady is not None and free > steady + seconds
                    if late and chat[0] > warmup + 1:
                        return
                    self.begun.append(chat)
                    free = await self._send(client, chat[0], free)
                    history: list[str] = []
                    for number in chat[1:]:
                        history += [self._requests[number - 1].prompt, self.read(number - 1)]
                        self._bodies[number] = body(self._target, self._requests[number], history)
                        # Its preparation is not the server's time.
                        free = await self._send(client, number, self._now())

            for _ in range(concurrency):
                users.create_task(user())

    async def _send(self, client: aiohttp.ClientSession, number: int, scheduled: float) -> float:
        """Send a request and read its answer until the deadline; return when it ended."""
        record, now = self.records[number], self._now()
        record.scheduled = scheduled
        if record.turn > 1 and self.records[number - 1].error:
            record.ended, record.error = now, "not sent: the turn before it failed"
            return now
        if now >= self._timeout:
            record.ended, record.error = now, f"not sent: {TIME_OVER}"
            return now
        record.sent = now
        try:
            async with asyncio.timeout(self._timeout - now):
                record.error = await self._receive(client, number)
        except TimeoutError:
            record.error = f"no whole answer when {TIME_OVER}, {self._now() - now:.1f} s after it was sent"
        except (aiohttp.ClientError, OSError) as failure:
            record.error = f"connection failed: {failure}"
        record.ended = self._now()
        return record.ended

    async def _receive(self, client: aiohttp.ClientSession, number: int) -> str:
        """Send a request and keep its answer's bytes; return what is wrong with its status, "" for nothing."""
        async with client.post(self._url, data=self._bodies[number]) as response:
            if response.status != 200:
                message = (await response.read())[:200].decode(errors="replace").strip()
                return f"HTTP {response.status}: {message}"
            async for chunk in response.content.iter_any():
                self._chunks[number].append((self._now(), chunk))
        return ""

    def read(self, number: int) -> str:
        """Read an answer into its record, once; return its text."""
        record, tokens = self.records[number], self._requests[number].output_tokens
        read_answer(self._target, self._requests[number], self._chunks[number], not record.error, record)
        if tokens and not record.error and record.output_tokens != tokens:
            record.error = f"{record.output_tokens} tokens came, not {tokens}"
        return record.text
