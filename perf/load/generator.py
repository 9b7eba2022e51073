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
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp

from perf.load.arrivals import Closed, Poisson, sessions
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
    return [_record(target, requests[number], exchange) for number, exchange in sorted(load.exchanges.items())]


@dataclass
class _Exchange:
    """A request and the bytes that came back. chunks: with their times. error: of the connection or the status."""

    scheduled: float
    sent: float | None = None
    ended: float = 0.0
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


class _Load:
    """A sequence of requests, sent to an idle server, until the last one is answered or the time is over."""

    def __init__(self, target: Target, requests: Sequence[Request], timeout: float) -> None:
        self._url = target.url + path(target)
        # Encoded beforehand: nothing but sending and receiving happens under load.
        self._bodies = [body(target, request) for request in requests]
        self._timeout = timeout
        self.exchanges: dict[int, _Exchange] = {}
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
        waiting = deque(range(len(self._bodies)))

        def user() -> Callable[[], Awaitable[bool]]:
            # Since when the user is free: not now, as other users' answers may have been read since.
            free = self._now()

            async def turn() -> bool:
                nonlocal free
                if not waiting:
                    return False
                free = await self._send(client, waiting.popleft(), free)
                return True

            return turn

        await sessions(user() for _ in range(min(arrivals.concurrency, len(waiting))))

    async def _open(self, client: aiohttp.ClientSession, arrivals: Poisson) -> None:
        async with asyncio.TaskGroup() as requests:
            for number, moment in enumerate(arrivals.moments(len(self._bodies))):
                # After the deadline they follow at once, and each is recorded as not sent.
                await asyncio.sleep(max(0.0, min(moment, self._timeout) - self._now()))
                requests.create_task(self._send(client, number, moment))

    async def _send(self, client: aiohttp.ClientSession, number: int, scheduled: float) -> float:
        """Send a request and read its answer until the deadline; return when it ended."""
        exchange = self.exchanges[number] = _Exchange(scheduled)
        if (now := self._now()) >= self._timeout:
            exchange.ended, exchange.error = now, f"not sent: {TIME_OVER}"
            return now
        exchange.sent = now
        try:
            async with asyncio.timeout(self._timeout - now):
                await self._receive(client, exchange, self._bodies[number])
        except TimeoutError:
            exchange.error = f"no whole answer when {TIME_OVER}, {self._now() - now:.1f} s after it was sent"
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError):
            exchange.error = "the server closed the connection before its answer was whole"
        except OSError as failure:
            exchange.error = f"connection failed: {os.strerror(failure.errno) if failure.errno else failure}"
        except aiohttp.ClientError as failure:
            exchange.error = f"the answer is not HTTP: {failure}"
        exchange.ended = self._now()
        return exchange.ended

    async def _receive(self, client: aiohttp.ClientSession, exchange: _Exchange, content: bytes) -> None:
        async with client.post(self._url, data=content) as response:
            if response.status != 200:
                said = (await response.read())[:200].decode(errors="replace").strip()
                exchange.error = f"HTTP {response.status}: {said}"
                return
            async for chunk in response.content.iter_any():
                exchange.chunks.append((self._now(), chunk))


def _record(target: Target, request: Request, exchange: _Exchange) -> Record:
    """Read the answer; where it fails, the record has what arrived before."""
    answer = read_answer(target.protocol, exchange.chunks, None if exchange.error else exchange.ended)
    error = answer.error or exchange.error
    if not error and answer.output_tokens != request.output_tokens:
        error = f"{answer.output_tokens} tokens came, {request.output_tokens} were asked for"
    return Record(
        scheduled=exchange.scheduled,
        sent=exchange.sent,
        ended=exchange.ended,
        token_times=tuple(answer.token_times),
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        error=error,
    )


def _main() -> None:
    """Be the process of `drive`: read the load from stdin, write its records to stdout. Ends when the caller dies."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != int(sys.argv[1]):
        sys.exit("the benchmark ended before its load began")
    sys.stdout.buffer.write(pickle.dumps(generate(*pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    _main()
