"""`soak`: put a server under mixed load, sample it meanwhile, and return the observations.

Rounds of steady load, a burst and a rest follow each other. Samples are taken throughout; in every rest the server must
become idle. After some rests a part of the stack is ended with requests running, and started again.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
from triton_llama import TritonLlamaError
from triton_local.errors import LauncherError

from perf.load.arrivals import sessions
from perf.overhead.processes import ServerProcesses
from perf.soak import libraries, resources
from perf.soak.clients import Addresses, addresses
from perf.soak.observed import Course, Life, Rest, Soaked
from perf.soak.phases import Phases
from perf.soak.resources import Readings
from perf.soak.restarting import restart
from perf.soak.sampler import Sampler
from perf.soak.stack import Part, Stack
from perf.soak.users import User, connect, kinds
from perf.soak.workload import FIXED, FIXED_PROMPT

_POLL_S = 0.05

_GONE = (
    OSError,
    RuntimeError,
    ValueError,
    subprocess.SubprocessError,
    httpx.HTTPError,
    TritonLlamaError,
    LauncherError,
)
"""Errors from a server that is gone, or parts of which are."""

ROWS_DEPEND = "a row's result depends on its batch"
"""The model's log line for weights with an outlier threshold."""


class SoakError(Exception):
    """The server can't be observed even before the load begins."""


def soak(stack: Stack, course: Course, say: Callable[[str], None]) -> Soaked:
    """Put the server, which has no other clients, under load. say: takes a line per round and per restart.

    Raises SoakError if the server is gone before the load begins; later, `cut_short` has the reason.
    """
    return asyncio.run(_soak(stack, course, say))


async def _soak(stack: Stack, course: Course, say: Callable[[str], None]) -> Soaked:
    def gone(error: Exception) -> str:
        ended = "" if stack.server.exit_code is None else f"; tritonserver has ended with code {stack.server.exit_code}"
        return f"the server can't be observed any more: {error}{ended}"

    try:
        at = await asyncio.to_thread(addresses, stack)
        processes = ServerProcesses.of(stack.server.pid)
        soaked = await _prepared(stack, at, course)
    except _GONE as error:
        raise SoakError(gone(error)) from error
    try:
        run = _Run(stack, at, processes, soaked, say)
        async with run.load():
            while run.unfinished:
                await run.round()
                say(run.line())
            await run.finish()
        soaked.same_processes = soaked.same_processes and run.has_its_processes()
    except _GONE as error:
        soaked.cut_short = gone(error)
    return soaked


async def _prepared(stack: Stack, at: Addresses, course: Course) -> Soaked:
    """Observe the idle server, and request the text that must never change."""
    async with connect(at.http) as client:
        fixed_text = (await client.generate(FIXED_PROMPT, FIXED)).text
    before, _ = await asyncio.to_thread(resources.settled, stack.server)
    possible = kinds(at.streams, at.openai is not None, libraries.installed())
    # The log is read now: it keeps only its last lines.
    rows_depend = ROWS_DEPEND in stack.server.log_text()
    return Soaked(course, possible, fixed_text, [Life(before)], rows_depend, same_processes=True)


class _Run:
    """A soak in progress: what observes the server and what drives its users."""

    def __init__(
        self, stack: Stack, at: Addresses, processes: ServerProcesses, soaked: Soaked, say: Callable[[str], None]
    ) -> None:
        self._stack = stack
        self._at = at
        self._soaked = soaked
        self._say = say
        self._course = soaked.course
        self._tally = soaked.tally
        self._phases = Phases(soaked.course.thinking_seconds)
        self._late_rounds = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._users: list[User] = []
        self._counted = self._tally.now()
        self._restarted = 0.0
        self._began = time.monotonic()
        self._sampler = Sampler(stack, processes, soaked, self._phases, self._began)

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Start the users, at rest, and the sampling; end them with the block."""
        seeds = random.Random(self._course.seed)
        own = [kind for kind in libraries.LIBRARIES if kind in self._soaked.kinds]
        processes = libraries.libraries(own, self._at.openai or "", self._at.served_name)
        users = self._users = [
            User(
                at=self._at,
                kinds=self._soaked.kinds,
                libraries=processes,
                randomness=random.Random(seeds.getrandbits(64)),
                tally=self._tally,
                fixed_text=self._soaked.fixed_text,
                phases=self._phases,
            )
            for _ in range(self._course.users)
        ]
        load = asyncio.create_task(sessions(user.turn for user in users))
        self._tasks = [load, asyncio.create_task(self._sampler.keep_sampling())]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for user in users:
                await user.disconnect()
            for library in processes.values():
                await library.close()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    @property
    def unfinished(self) -> bool:
        """Whether another round follows."""
        if self.seconds < self._course.seconds:
            return True
        missing = any(not self._tally.done[kind] for kind in self._soaked.kinds) or self._missing_restarts
        return missing and self._late_rounds < self._course.late_rounds

    @property
    def _missing_restarts(self) -> bool:
        return self._course.restart_seconds is not None and len({one.part for one in self._soaked.restarts}) < 2

    async def round(self) -> None:
        """Run steady load, a burst, a rest, and a restart if one is due."""
        self._late_rounds += self.seconds >= self._course.seconds
        self._phases.change("steady")
        await self._pass(self._course.steady_seconds)
        self._phases.change("burst")
        await self._pass(self._course.burst_seconds)
        self._phases.change("rest")
        while self._tally.busy:
            await self._pass(_POLL_S)
        idle = await self._settled()
        self._soaked.rests.append(Rest(self.seconds, idle.levels))
        await self._pass(self._course.rest_seconds)
        every = self._course.restart_seconds
        if every is None or not self.unfinished:
            return
        late = self._missing_restarts and self.seconds >= self._course.seconds
        if late or self.seconds >= self._restarted + every:
            self._restarted = self.seconds
            await self._restart("endpoint" if len(self._soaked.restarts) % 2 else "server")

    async def finish(self) -> None:
        """End the load, and read the metrics of the idle server."""
        self._phases.change("over")
        await self._tasks[0]
        await self._settled()

    def has_its_processes(self) -> bool:
        """Return whether the server still has the processes that its life began with."""
        return ServerProcesses.of(self._stack.server.pid) == self._sampler.processes

    def line(self) -> str:
        """Return a line of progress."""
        figures, tally = self._soaked.samples[-1].figures, self._tally
        return (
            f"{self.seconds / 60:.1f} of {self._course.seconds / 60:g} minutes: "
            f"{tally.completed.total():,} completed, {tally.left:,} left, {tally.refused:,} refused, "
            f"{tally.errors.total()} errors; tritonserver {figures['triton_rss_mib']:,.0f} MiB, "
            f"model {figures['model_rss_mib']:,.0f} MiB"
        )

    async def _restart(self, part: Part) -> None:
        async with self._sampler.paused:
            self._soaked.same_processes = self._soaked.same_processes and self.has_its_processes()
            restarted = await restart(self._stack, part, self._users, self._tally, lambda: self.seconds)
            self._soaked.restarts.append(restarted)
            # The requests that ran meanwhile are in no life's counts.
            before, _ = await asyncio.to_thread(resources.settled, self._stack.server)
            self._soaked.lives.append(Life(before))
            self._counted = self._tally.now()
            self._sampler.begin_life(part, before)
        self._say(
            f"{self.seconds / 60:.1f}: the {part} started again: {restarted.answered} of {restarted.running} running "
            f"requests answered, ended with code {restarted.code} after {restarted.end_seconds:.1f} s; "
            f"{restarted.turned_away} of {restarted.knocks} requests turned away meanwhile"
        )

    async def _settled(self) -> Readings:
        found, sent = await asyncio.to_thread(resources.settled, self._stack.server)
        self._tally.refused += sent
        life = self._soaked.lives[-1]
        life.after, life.counts = found, self._tally.since(self._counted)
        return found

    async def _pass(self, seconds: float) -> None:
        """Let time pass, unless the users or the sampling fail."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            error = task.exception()
            if isinstance(error, BaseExceptionGroup):
                # The first user's; its failure has cancelled the others.
                raise error.exceptions[0]
            raise error or RuntimeError("the users or the sampling ended early")
