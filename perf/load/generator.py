"""`drive`: put a server under load, on asyncio and aiohttp, and return what happened to the requests.

A closed loop: each of `concurrency` users sends its next request when the last one is answered, until none is left. The
warm-up is no phase of its own: its requests are sent first in the same sequence, so that the measured ones meet a busy
server.

Every request has a connection of its own, because a server may close a kept one just when it is used again; here that
costs a fraction of a millisecond, the same for every server. There are no retries: every failure is in its record.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import aiohttp

from perf.load.protocols import Request, Target, body, path, read_answer
from perf.load.records import TIME_OVER, Record, Run


def drive(target: Target, requests: Sequence[Request], concurrency: int, warmup: int, timeout: float) -> Run:
    """Send the requests in one sequence; the first `warmup` are recorded but not measured.

    For the throughput the warm-up should be at least the concurrency (`load.records` explains why).
    `timeout`: seconds for all requests together, warm-up included. Requests not answered by then, or never sent, are
    recorded as errors, as is everything else that fails. Raises ValueError unless the warm-up leaves a request.
    """
    if not 0 <= warmup < len(requests):
        raise ValueError(f"warmup is {warmup}, must be 0 … {len(requests) - 1}: fewer than the requests")
    # A process of its own, so that the benchmark does not delay it; not a fork, which would copy torch's threads.
    with ProcessPoolExecutor(1, get_context("forkserver")) as process:
        records = process.submit(generate, target, requests, concurrency, timeout).result()
    return Run(concurrency, tuple(records), warmup)


def generate(target: Target, requests: Sequence[Request], concurrency: int, timeout: float) -> list[Record]:
    """Do the same in this process; return one record per request, in order."""
    load = _Load(target, requests, timeout)
    asyncio.run(load.run(concurrency))
    for request, record, chunks in zip(requests, load.records, load.chunks, strict=True):
        read_answer(target.protocol, chunks, not record.error, record)
        if not record.error and record.output_tokens != request.output_tokens:
            record.error = f"{record.output_tokens} tokens came, not {request.output_tokens}"
    return load.records


class _Load:
    """A sequence of requests, sent to an idle server, until the last one is answered or the time is over.

    records: still without the answers. chunks: their bytes, with the time of each.
    """

    def __init__(self, target: Target, requests: Sequence[Request], timeout: float) -> None:
        self._url = target.url + path(target)
        # Encoded beforehand: nothing but sending and receiving happens under load.
        self._bodies = [body(target, request) for request in requests]
        self._timeout = timeout
        self.records = [Record(0.0) for _ in requests]
        self.chunks: list[list[tuple[float, bytes]]] = [[] for _ in requests]
        self._began = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def run(self, concurrency: int) -> None:
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
            waiting = iter(range(len(self._bodies)))

            async def user() -> None:
                # Since when the user is free: not now, as other users' answers may have been read since.
                free = self._now()
                for number in waiting:
                    free = await self._send(client, number, free)

            for _ in range(concurrency):
                users.create_task(user())

    async def _send(self, client: aiohttp.ClientSession, number: int, scheduled: float) -> float:
        """Send a request and read its answer until the deadline; return when it ended."""
        record, now = self.records[number], self._now()
        record.scheduled = scheduled
        if now >= self._timeout:
            record.ended, record.error = now, f"not sent: {TIME_OVER}"
            return now
        record.sent = now
        try:
            async with asyncio.timeout(self._timeout - now):
                record.error = await self._receive(client, number)
        except TimeoutError:
            record.error = f"no whole answer when {TIME_OVER}, {self._now() - now:.1f} s after it was sent"
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError):
            record.error = "the server closed the connection before its answer was whole"
        except OSError as failure:
            record.error = f"connection failed: {os.strerror(failure.errno) if failure.errno else failure}"
        except aiohttp.ClientError as failure:
            record.error = f"the answer is not HTTP: {failure}"
        record.ended = self._now()
        return record.ended

    async def _receive(self, client: aiohttp.ClientSession, number: int) -> str:
        """Send a request and keep its answer's bytes; return what is wrong with its status, "" for nothing."""
        async with client.post(self._url, data=self._bodies[number]) as response:
            if response.status != 200:
                message = (await response.read())[:200].decode(errors="replace").strip()
                return f"HTTP {response.status}: {message}"
            async for chunk in response.content.iter_any():
                self.chunks[number].append((self._now(), chunk))
        return ""
