"""The generator itself, on asyncio and aiohttp.

Closed loop: each user sends until no request is left. Open loop: each request is sent at its arrival time, however many
are outstanding. The warm-up is no phase of its own: its requests are sent first in the same sequence, so that the
measured ones meet a busy server.

Every request has a connection of its own, because a server may close a kept one just when it is used again; here that
costs a fraction of a millisecond, the same for every server. There are no retries: every failure is in its record.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from dataclasses import dataclass, field

import aiohttp

from perf.load.arrivals import Closed, sessions
from perf.load.driver import Plan
from perf.load.protocols import Request, Target, body, path, read_answer
from perf.load.records import TIME_OVER, Record


async def generate(plan: Plan) -> list[Record]:
    """Run the plan; return one record per request, in order."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Content-Type": "application/json"},
        # A server must not spend its time on compression.
        skip_auto_headers=["Accept-Encoding"],
    ) as client:
        load = _Load(plan, client)
        await (load.closed(plan.arrivals.concurrency) if isinstance(plan.arrivals, Closed) else load.open())
    return [_record(plan, number, exchange) for number, exchange in sorted(load.exchanges.items())]


async def send_one(target: Target, request: Request, timeout: float) -> Record:
    """Send a single request and return its record."""
    (record,) = await generate(Plan(target, [request], Closed(1), timeout))
    return record


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

    def __init__(self, plan: Plan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._client = client
        self._url = plan.target.url + path(plan.target)
        # Encoded beforehand: nothing but sending and receiving happens under load.
        self._bodies = [body(plan.target, request) for request in plan.requests]
        self.exchanges: dict[int, _Exchange] = {}
        self._began = time.perf_counter()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def closed(self, concurrency: int) -> None:
        """Run users that send until no request is left."""
        waiting = deque(range(len(self._bodies)))

        def user() -> _User:
            return _User(self, waiting, self._now())

        await sessions(user().turn for _ in range(min(concurrency, len(waiting))))

    async def open(self) -> None:
        """Send each request at its arrival time."""
        assert not isinstance(self._plan.arrivals, Closed)
        async with asyncio.TaskGroup() as requests:
            for number, moment in enumerate(self._plan.arrivals.moments(len(self._bodies))):
                # After the deadline they follow at once, and each is recorded as not sent.
                await asyncio.sleep(max(0.0, min(moment, self._plan.timeout) - self._now()))
                requests.create_task(self.send(number, moment))

    async def send(self, number: int, scheduled: float) -> float:
        """Send a request and read its answer until the deadline; return when it ended."""
        exchange = self.exchanges[number] = _Exchange(scheduled)
        if (now := self._now()) >= self._plan.timeout:
            exchange.ended, exchange.error = now, f"not sent: {TIME_OVER}"
            return now
        exchange.sent = now
        try:
            async with asyncio.timeout(self._plan.timeout - now):
                await self._receive(exchange, self._bodies[number])
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

    async def _receive(self, exchange: _Exchange, content: bytes) -> None:
        async with self._client.post(self._url, data=content) as response:
            if response.status != 200:
                said = (await response.read())[:200].decode(errors="replace").strip()
                exchange.error = f"HTTP {response.status}: {said}"
                return
            async for chunk in response.content.iter_any():
                exchange.chunks.append((self._now(), chunk))


@dataclass
class _User:
    """A user of a closed loop. free: since when; not now, as other users' answers may have been read since."""

    load: _Load
    waiting: deque[int]
    free: float

    async def turn(self) -> bool:
        """Send the next request; return whether there was one."""
        if not self.waiting:
            return False
        self.free = await self.load.send(self.waiting.popleft(), self.free)
        return True


def _record(plan: Plan, number: int, exchange: _Exchange) -> Record:
    """Read the answer; where it fails, the record has what arrived before."""
    answer = read_answer(plan.target.protocol, exchange.chunks, None if exchange.error else exchange.ended)
    asked, error = plan.requests[number].output_tokens, answer.error or exchange.error
    if not error and answer.output_tokens != asked:
        error = f"{answer.output_tokens} tokens came, {asked} were asked for"
    return Record(
        scheduled=exchange.scheduled,
        sent=exchange.sent,
        first_token=answer.token_times[0] if answer.token_times else None,
        last_token=answer.last_token,
        ended=exchange.ended,
        token_times=tuple(answer.token_times),
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        error=error,
    )
