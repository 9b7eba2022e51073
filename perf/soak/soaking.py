"""`soak`: put a server under mixed load, sample it meanwhile, and return the observations.

Rounds of steady load, a burst and a rest follow each other. Samples are taken throughout; in every rest the server must
become idle.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

import httpx
from triton_llama import TritonLlamaError
from triton_llama.status import read_config
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton

from perf.load.arrivals import sessions
from perf.load.summary import percentiles
from perf.overhead.processes import ServerProcesses
from perf.soak import resources
from perf.soak.resources import Readings
from perf.soak.users import Phase, Phases, Tally, User, connect, kinds
from perf.soak.workload import FIXED, FIXED_PROMPT

_POLL_S = 0.05
_TIMEOUT_S = 30.0
_SHORTEST_INTERVAL_S = 0.5
"""Tokens per second over less are chance."""

_GONE = (OSError, RuntimeError, ValueError, subprocess.SubprocessError, httpx.HTTPError, TritonLlamaError)
"""Errors from a server that is gone, or parts of which are."""

ROWS_DEPEND = "a row's result depends on its batch"
"""The model's log line for weights with an outlier threshold."""


class SoakError(Exception):
    """The server can't be observed even before the load begins."""


@dataclass(frozen=True)
class Course:
    """One soak's load. Raises ValueError for a value that isn't above 0.

    seconds: of all rounds; the last one is completed. thinking_seconds: mean pause of a user between two actions in the
    steady phase; none in a burst. rest_seconds: from when the server is idle. sample_seconds: between two samples.
    late_rounds: further rounds at most until every kind of action has been done, which takes longer on slow machines.
    """

    seconds: float
    users: int = 24
    steady_seconds: float = 40.0
    burst_seconds: float = 15.0
    rest_seconds: float = 5.0
    thinking_seconds: float = 1.5
    sample_seconds: float = 5.0
    seed: int = 1
    late_rounds: int = 10

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value}, must be above 0")


COLUMNS = (
    *("shared_memory_mib", "vram_mib"),
    *(f"{process}_{name}" for process in ("triton", "model") for name in resources.PROCESS),
    *("slots_in_use", "waiting", "pending", "tokens_per_second", "answers", "p95_ms"),
)
"""A sample's figures: what the server takes, its metrics, and the last three since the previous sample."""


@dataclass(frozen=True)
class Sample:
    """The server at one moment. seconds: since the start.

    figures: by COLUMNS, without vram_mib where there is no CUDA and without p95_ms where there was no answer.
    """

    seconds: float
    phase: Phase
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Rest:
    """The metrics in a rest that should be 0."""

    seconds: float
    levels: dict[str, float]


@dataclass
class Soaked:
    """The observations of a soak, complete or as far as it came.

    before, after: the metrics of the idle server; after is None if the server was gone. same_processes: at the end as
    at the start. rows_depend: on their batch, as the model reports of its weights. cut_short: why the soak ended early.
    """

    course: Course
    streams: bool
    before: Readings
    fixed_text: str
    rows_depend: bool = False
    samples: list[Sample] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)
    after: Readings | None = None
    same_processes: bool = False
    cut_short: str = ""

    @property
    def seconds(self) -> float:
        """From the start to the last sample."""
        return self.samples[-1].seconds if self.samples else 0.0

    def grown(self, name: str, **labels: str) -> float:
        """Return the growth of a metric's series with these labels. Raises ValueError if unknown."""
        if self.after is None:
            raise ValueError("the server was gone at the end")
        return self.after.total(name, **labels) - self.before.total(name, **labels)

    @property
    def second_half(self) -> list[Sample]:
        """The samples of the second half of the time, when the processes have warmed up."""
        return [sample for sample in self.samples if sample.seconds >= self.seconds / 2]


def soak(server: LocalTriton, course: Course, say: Callable[[str], None]) -> Soaked:
    """Put the server, which has no other clients, under load. say: takes a line per round.

    Raises SoakError if the server is gone before the load begins; later, `cut_short` has the reason.
    """
    return asyncio.run(_soak(server, course, say))


async def _soak(server: LocalTriton, course: Course, say: Callable[[str], None]) -> Soaked:
    def gone(error: Exception) -> str:
        ended = "" if server.exit_code is None else f"; tritonserver has ended with code {server.exit_code}"
        return f"the server can't be observed any more: {error}{ended}"

    try:
        processes = ServerProcesses.of(server.pid)
        soaked = await _prepared(server, course)
    except _GONE as error:
        raise SoakError(gone(error)) from error
    try:
        run = _Run(server, processes, soaked)
        async with run.load():
            while run.unfinished:
                await run.round()
                say(run.line())
            soaked.after = await run.finish()
        soaked.same_processes = ServerProcesses.of(server.pid) == processes
    except _GONE as error:
        soaked.cut_short = gone(error)
    return soaked


async def _prepared(server: LocalTriton, course: Course) -> Soaked:
    """Observe the idle server, and request the text that must never change."""
    streams = await asyncio.to_thread(_streams, server)
    async with connect(server.http_url) as client:
        fixed_text = (await client.generate(FIXED_PROMPT, FIXED)).text
    before, _ = await asyncio.to_thread(resources.settled, server)
    # The log is read now: it keeps only its last lines.
    return Soaked(course, streams, before, fixed_text, ROWS_DEPEND in server.log_text())


class _Run:
    """A soak in progress: what observes the server and what drives its users."""

    def __init__(self, server: LocalTriton, processes: ServerProcesses, soaked: Soaked) -> None:
        self._server = server
        self._processes = processes
        self._soaked = soaked
        self._course = soaked.course
        self._tally = soaked.tally
        self._phases = Phases(soaked.course.thinking_seconds)
        self._late_rounds = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._generated = soaked.before.total("llama_generated_tokens_total")
        self._began = self._sampled = time.monotonic()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Start the users, at rest, and the sampling; end them with the block."""
        seeds = random.Random(self._course.seed)
        users = [
            User(
                urls={"http": self._server.http_url, "grpc": self._server.grpc_url},
                streams=self._soaked.streams,
                randomness=random.Random(seeds.getrandbits(64)),
                tally=self._tally,
                fixed_text=self._soaked.fixed_text,
                phases=self._phases,
            )
            for _ in range(self._course.users)
        ]
        load = asyncio.create_task(sessions(user.turn for user in users))
        self._tasks = [load, asyncio.create_task(self._keep_sampling())]
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            for user in users:
                await user.disconnect()

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.monotonic() - self._began

    @property
    def unfinished(self) -> bool:
        """Whether another round follows."""
        if self.seconds < self._course.seconds:
            return True
        missing = any(not self._tally.done[kind] for kind in kinds(self._soaked.streams))
        return missing and self._late_rounds < self._course.late_rounds

    async def round(self) -> None:
        """Run steady load, a burst, and a rest."""
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

    async def finish(self) -> Readings:
        """End the load; return the metrics of the idle server."""
        self._phases.change("over")
        await self._tasks[0]
        return await self._settled()

    def line(self) -> str:
        """Return a line of progress."""
        figures, tally = self._soaked.samples[-1].figures, self._tally
        return (
            f"{self.seconds / 60:.1f} of {self._course.seconds / 60:g} minutes: "
            f"{tally.completed.total():,} completed, {tally.left:,} left, {tally.refused:,} refused, "
            f"{tally.errors.total()} errors; tritonserver {figures['triton_rss_mib']:,.0f} MiB, "
            f"model {figures['model_rss_mib']:,.0f} MiB"
        )

    async def _settled(self) -> Readings:
        found, sent = await asyncio.to_thread(resources.settled, self._server)
        self._tally.refused += sent
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
            await self._sample()
            await asyncio.sleep(self._course.sample_seconds)

    async def _sample(self) -> None:
        now = await asyncio.to_thread(resources.read, self._server)
        figures = await asyncio.to_thread(resources.of, self._processes)
        moment, generated = time.monotonic(), now.total("llama_generated_tokens_total")
        latencies = self._tally.take_latencies()
        figures |= {
            "slots_in_use": now.total("llama_slots_in_use"),
            "waiting": now.total("llama_waiting_rows"),
            "pending": now.total("nv_inference_pending_request_count"),
            "tokens_per_second": (generated - self._generated) / max(moment - self._sampled, _SHORTEST_INTERVAL_S),
            "answers": len(latencies),
        }
        if latencies:
            figures["p95_ms"] = percentiles(latencies)["p95"]
        self._soaked.samples.append(Sample(moment - self._began, self._phases.phase, figures))
        self._sampled, self._generated = moment, generated


def _streams(server: LocalTriton) -> bool:
    """Return whether the running config streams."""
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/config"
    return read_config(httpx.get(url, timeout=_TIMEOUT_S).raise_for_status().json()).decoupled
