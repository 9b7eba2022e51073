"""`soak`: put a server under mixed load, sample it meanwhile, and return the observations.

Rounds of steady load, a burst and a rest follow each other. Samples are taken throughout; in every rest the server must
become idle. After some rests a part of the stack is ended with requests running, and started again.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import psutil
from triton_llama import TritonLlamaError
from triton_local.errors import LauncherError

from perf import metrics
from perf.load.summary import percentiles
from perf.overhead.processes import ServerProcesses
from perf.soak import resources
from perf.soak.clients import Addresses, addresses
from perf.soak.libraries import LIBRARIES, Library, installed
from perf.soak.observed import Course, Life, Sample, Soaked
from perf.soak.resources import Readings
from perf.soak.restarting import restart
from perf.soak.stack import Part, Stack
from perf.soak.users import Phases, User, connect, kinds
from perf.soak.workload import FIXED, FIXED_PROMPT

_POLL_S = 0.05
_SEED = 1
_SHORTEST_INTERVAL_S = 0.5
"""Tokens per second over less are chance."""
_GONE = (
    OSError,
    psutil.Error,
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


async def soak(stack: Stack, course: Course, say: Callable[[str], None]) -> Soaked:
    """Put the server, which has no other clients, under load. say: takes a line per round and per restart.

    Raises SoakError if the server is gone before the load begins; later, `cut_short` has the reason.
    """

    def gone(error: Exception) -> str:
        ended = "" if stack.server.exit_code is None else f"; tritonserver has ended with code {stack.server.exit_code}"
        return f"the server can't be observed any more: {error}{ended}"

    try:
        at = await asyncio.to_thread(addresses, stack)
        async with connect(at.http) as client:
            fixed_text = (await client.generate(FIXED_PROMPT, FIXED)).text
        before, _ = await asyncio.to_thread(resources.settled, stack.server)
        # The log is read now: it keeps only its last lines.
        rows_depend = ROWS_DEPEND in stack.server.log_text()
        soaked = Soaked(course, kinds(at.streams, installed()), [Life(before)], rows_depend)
        run = _Run(stack, at, soaked, fixed_text)
    except _GONE as error:
        raise SoakError(gone(error)) from error
    try:
        async with run.load():
            while run.unfinished:
                await run.round(say)
            await run.finish()
    except _GONE as error:
        soaked.cut_short = gone(error)
    return soaked


class _Run:
    """A soak in progress: what observes the server and what drives its users."""

    def __init__(self, stack: Stack, at: Addresses, soaked: Soaked, fixed_text: str) -> None:
        self._stack = stack
        self._soaked = soaked
        self._course = soaked.course
        self._tally = soaked.tally
        self._phases = Phases(soaked.course.thinking_seconds)
        self._processes = ServerProcesses.of(stack.server.pid)
        own = [kind for kind in LIBRARIES if kind in soaked.kinds]
        self._libraries = {name: Library(name, at.openai, at.served_name) for name in own}
        seeds = random.Random(_SEED)
        self._users = [
            User(
                at=at,
                kinds=soaked.kinds,
                libraries=self._libraries,
                randomness=random.Random(seeds.getrandbits(64)),
                tally=soaked.tally,
                fixed_text=fixed_text,
                phases=self._phases,
            )
            for _ in range(soaked.course.users)
        ]
        self._late_rounds = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._restarted = 0.0
        # Held while a sample is taken, and while a part is gone.
        self._sampling = asyncio.Lock()
        self._began = time.monotonic()
        self._begin_life(soaked.lives[0])

    def _begin_life(self, life: Life) -> None:
        self._counted = Counter(self._tally.counts)
        self._generated = metrics.total(life.before, "llama_generated_tokens_total")
        self._sampled = time.monotonic()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Start the users, at rest, and the sampling; end them with the block."""
        load = asyncio.create_task(self._act())
        self._tasks = [load, asyncio.create_task(self._keep_sampling())]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for user in self._users:
                await user.disconnect()
            for library in self._libraries.values():
                await library.close()

    async def _act(self) -> None:
        """Let every user take turn after turn until the load is over; an exception in a turn cancels all."""

        async def act(user: User) -> None:
            while await user.turn():
                pass

        async with asyncio.TaskGroup() as users:
            for user in self._users:
                users.create_task(act(user))

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def unfinished(self) -> bool:
        """Whether another round follows."""
        missing = any(not self._tally.done[kind] for kind in self._soaked.kinds) or self._missing_restarts
        return self._seconds < self._course.seconds or (missing and self._late_rounds < self._course.late_rounds)

    @property
    def _missing_restarts(self) -> bool:
        return self._course.restart_seconds is not None and len({one["part"] for one in self._soaked.restarts}) < 2

    async def round(self, say: Callable[[str], None]) -> None:
        """Run steady load, a burst, a rest, and a restart if one is due."""
        self._late_rounds += self._seconds >= self._course.seconds
        self._phases.change("steady")
        await self._pass(self._course.steady_seconds)
        self._phases.change("burst")
        await self._pass(self._course.burst_seconds)
        self._phases.change("rest")
        while self._tally.busy:
            await self._pass(_POLL_S)
        idle = await self._settle()
        self._soaked.rests.append((self._seconds, resources.levels(idle)))
        await self._pass(self._course.rest_seconds)
        say(
            f"{self._seconds / 60:.1f} of {self._course.seconds / 60:g} minutes: {dict(self._tally.counts)}, "
            f"{self._tally.errors.total()} errors; "
            + ", ".join(f"{name} {self._soaked.samples[-1][name]:,.0f}" for name in ("triton_rss_mib", "model_rss_mib"))
        )
        every = self._course.restart_seconds
        if every is not None and self.unfinished:
            late = self._missing_restarts and self._seconds >= self._course.seconds
            if late or self._seconds >= self._restarted + every:
                self._restarted = self._seconds
                await self._restart("endpoint" if len(self._soaked.restarts) % 2 else "server")
                say(f"restarted: {self._soaked.restarts[-1]}")

    async def finish(self) -> None:
        """End the load, and read the metrics and the processes of the idle server."""
        self._phases.change("over")
        await self._tasks[0]
        await self._settle()
        self._compare_processes()

    def _compare_processes(self) -> None:
        """Note whether the server still has the processes that its life began with."""
        self._soaked.same_processes &= ServerProcesses.of(self._stack.server.pid) == self._processes

    async def _restart(self, part: Part) -> None:
        async with self._sampling:
            self._compare_processes()
            seconds = self._seconds
            restarted = await restart(self._stack, part, self._users, self._tally)
            self._soaked.restarts.append({"seconds": seconds, **restarted})
            # The requests that ran meanwhile are in no life's counts.
            before, _ = await asyncio.to_thread(resources.settled, self._stack.server)
            self._processes = ServerProcesses.of(self._stack.server.pid)
            self._soaked.lives.append(Life(before))
            self._begin_life(self._soaked.lives[-1])

    async def _settle(self) -> Readings:
        found, sent = await asyncio.to_thread(resources.settled, self._stack.server)
        self._tally.counts["refused"] += sent
        life = self._soaked.lives[-1]
        life.after, life.counts = found, self._tally.counts - self._counted
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

    async def _keep_sampling(self) -> None:
        while True:
            async with self._sampling:
                await self._sample()
            await asyncio.sleep(self._course.sample_seconds)

    async def _sample(self) -> None:
        now = await asyncio.to_thread(resources.read, self._stack.server)
        taken = await asyncio.to_thread(resources.of, self._processes, self._stack.endpoint.pid)
        moment, generated = time.monotonic(), metrics.total(now, "llama_generated_tokens_total")
        latencies, restarts = self._tally.take_latencies(), self._soaked.restarts
        rate = (generated - self._generated) / max(moment - self._sampled, _SHORTEST_INTERVAL_S)
        sample: Sample = {
            "seconds": moment - self._began,
            "phase": self._phases.phase,
            "life": sum(one["part"] == "server" for one in restarts),
            "endpoint_life": len(restarts),
            **taken,
            **dict(zip(("slots_in_use", "waiting", "pending"), resources.levels(now).values(), strict=True)),
            "tokens_per_second": rate,
            "answers": len(latencies),
        }
        if latencies:
            sample["p95_ms"] = percentiles(latencies)["p95"]
        self._soaked.samples.append(sample)
        self._sampled, self._generated = moment, generated
