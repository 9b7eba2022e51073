"""`drive`: put a server under load, on asyncio and aiohttp, and return what happened to the requests.

Closed loop: each user sends until no request is left. Open loop: each request is sent at its arrival time, however many
are outstanding. The warm-up is no phase of its own: its requests are sent first in the same sequence, so that the
measured ones meet a busy server.

Every request has a connection of its own, because a server may close a kept one just when it is used again; here that
costs a fraction of a millisecond, the same for every server. There are no retries: every failure is in its record.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import aiohttp

from perf.load.arrivals import Closed, Poisson
from perf.load.protocols import Request, Target, body, path, read_answer
from perf.load.records import TIME_OVER, Record, Run

# For the process to start, to read the answers and to return the records.
_SLACK_S = 60.0
_PR_SET_PDEATHSIG = 1


class LoadError(Exception):
    """The generator itself failed, which says nothing about the server; `str()` is one line."""


def drive(target: Target, requests: Sequence[Request], arrivals: Closed | Poisson, warmup: int, timeout: float) -> Run:
    """Send the requests in one sequence; the first `warmup` are recorded but not measured.

    For a closed loop's throughput the warm-up should be at least its concurrency (`load.records` explains why).
    `timeout`: seconds for all requests together, warm-up included. Requests not answered by then, or never sent, are
    recorded as errors, as is everything else that fails. Raises LoadError if the generator itself fails.
    """
    if not 0 <= warmup < len(requests):
        raise ValueError(f"warmup is {warmup}, must be 0 … {len(requests) - 1}: fewer than the requests")
    # A process of its own, so that the benchmark does not delay it; a new interpreter, since a fork would copy torch's
    # threads, and multiprocessing's spawn would import the benchmark's main module again.
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "perf.load.generator", str(os.getpid())],
            input=pickle.dumps((target, requests, arrivals, timeout)),
            capture_output=True,
            timeout=timeout + _SLACK_S,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise LoadError(f"the load generator was still running {_SLACK_S:g} s after its {timeout:g} s") from error
    if ended.returncode != 0:
        lines = ended.stderr.decode(errors="replace").strip().splitlines() or ["nothing on stderr"]
        raise LoadError(f"the load generator ended with code {ended.returncode}: {lines[-1]}")
    return Run(arrivals, tuple(pickle.loads(ended.stdout)), warmup)


def generate(target: Target, requests: Sequence[Request], arrivals: Closed | Poisson, timeout: float) -> list[Record]:
    """Do the same in this process; return one record per request, in order."""
    load = _Load(target, requests, timeout)
    asyncio.run(load.run(arrivals))
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

    async def run(self, arrivals: Closed | Poisson) -> None:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            headers={"Content-Type": "application/json"},
            # A server must not spend its time on compression.
            skip_auto_headers=["Accept-Encoding"],
        ) as client:
            await (self._closed(client, arrivals) if isinstance(arrivals, Closed) else self._open(client, arrivals))

    async def _closed(self, client: aiohttp.ClientSession, arrivals: Closed) -> None:
        waiting = iter(range(len(self._bodies)))

        async def user() -> None:
            # Since when the user is free: not now, as other users' answers may have been read since.
            free = self._now()
            for number in waiting:
                free = await self._send(client, number, free)

        async with asyncio.TaskGroup() as users:
            for _ in range(min(arrivals.concurrency, len(self._bodies))):
                users.create_task(user())

    async def _open(self, client: aiohttp.ClientSession, arrivals: Poisson) -> None:
        async with asyncio.TaskGroup() as requests:
            for number, moment in enumerate(arrivals.moments(len(self._bodies))):
                # After the deadline they follow at once, and each is recorded as not sent.
                await asyncio.sleep(max(0.0, min(moment, self._timeout) - self._now()))
                requests.create_task(self._send(client, number, moment))

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


def _main() -> None:
    """Be the process of `drive`: read the load from stdin, write its records to stdout. Ends when the caller dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the benchmark ended before its load began")
    sys.stdout.buffer.write(pickle.dumps(generate(*pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    _main()
