"""`soak`: put a server under a course of load, look at it all the while, and return what was observed.

The only module here that holds users, weather and looks together. What it comes to is `verdict`'s business.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping
from types import TracebackType

from triton_llama import TritonLlamaError
from triton_llama.endpoint import Protocol
from triton_llama.status import read_config
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton

from perf.load.summary import percentiles
from perf.overhead.processes import ServerProcesses
from perf.soak import readings, users
from perf.soak.course import Course
from perf.soak.observations import Rest, Sample, Soaked
from perf.soak.readings import Readings
from perf.soak.tally import Tally
from perf.soak.users import User
from perf.soak.vitals import ServerVitals
from perf.soak.weather import Weather

_POLL_S = 0.05
_ASK_TIMEOUT_S = 30.0
_LAST_LOOK_S = 0.5
"""Below that, tokens per second since the look before would be a matter of chance."""

_GONE = (OSError, RuntimeError, ValueError, subprocess.SubprocessError, TritonLlamaError)
"""What comes of looking at a server that isn't there any more, or of which parts are missing."""

ROWS_DEPEND = "a row's result depends on its batch"
"""The model's own words for weights with an outlier threshold."""


class SoakError(Exception):
    """The soak could not go on: the server is gone, or can't be looked at.

    soaked: what was observed until then; None where the load hadn't begun.
    """

    def __init__(self, message: str, soaked: Soaked | None = None) -> None:
        super().__init__(message)
        self.soaked = soaked


def soak(server: LocalTriton, course: Course, say: Callable[[str], None]) -> Soaked:
    """Put the server under this load and return what was observed. say: takes a line about every round.

    Nobody else may use the server meanwhile. Raises SoakError, with what was observed, if it goes away.
    """
    return asyncio.run(_soak(server, course, say))


async def _soak(server: LocalTriton, course: Course, say: Callable[[str], None]) -> Soaked:
    try:
        conductor = await _Conductor.of(server, course)
    except _GONE as error:
        raise SoakError(_cut_short(server, error)) from error
    try:
        async with conductor:
            while conductor.goes_on:
                await conductor.round()
                say(conductor.line())
            after = await conductor.end()
        return conductor.soaked(after)
    except _GONE as error:
        why = _cut_short(server, error)
        raise SoakError(why, conductor.soaked(None, why)) from error


def _cut_short(server: LocalTriton, error: Exception) -> str:
    ended = "" if server.exit_code is None else f"; tritonserver has ended with code {server.exit_code}"
    return f"the server can't be looked at any more: {error}{ended}"


def _streams(server: LocalTriton) -> bool:
    """Return whether the config that runs answers in pieces, as the server itself says."""
    url = f"http://{server.http_url}/v2/models/{MODEL_NAME}/config"
    with urllib.request.urlopen(url, timeout=_ASK_TIMEOUT_S) as response:
        return read_config(json.load(response)).decoupled


class _Conductor:
    """Changes the weather and keeps the looks. To be entered in the event loop that the users are to live in."""

    def __init__(
        self,
        server: LocalTriton,
        processes: ServerProcesses,
        course: Course,
        streams: bool,
        fixed_text: str,
        rows_depend: bool,
        before: Readings,
    ) -> None:
        self._server = server
        self._processes = processes
        self._course = course
        self._streams = streams
        self._fixed_text = fixed_text
        self._rows_depend = rows_depend
        self._before = before
        self._tally = Tally()
        self._weather = Weather(course.thinking_seconds)
        self._samples: list[Sample] = []
        self._rests: list[Rest] = []
        self._late_rounds = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._began = self._looked = time.monotonic()
        self._generated = before.total("llama_generated_tokens_total")

    @classmethod
    async def of(cls, server: LocalTriton, course: Course) -> _Conductor:
        """Look at the server as it is before, and ask it for the text that must never change."""
        processes = ServerProcesses.of(server.pid)
        streams = await asyncio.to_thread(_streams, server)
        fixed_text = await users.ask_the_fixed(server.http_url)
        before = await asyncio.to_thread(readings.settled, server)
        # Now, because a log keeps only its end.
        rows_depend = ROWS_DEPEND in server.log_text()
        return cls(server, processes, course, streams, fixed_text, rows_depend, before.readings)

    async def __aenter__(self) -> _Conductor:
        randomness = random.Random(self._course.seed)
        urls: Mapping[Protocol, str] = {"http": self._server.http_url, "grpc": self._server.grpc_url}
        for _ in range(self._course.users):
            own = random.Random(randomness.getrandbits(64))
            user = User(urls, self._streams, own, self._tally, self._fixed_text)
            self._tasks.append(asyncio.create_task(user.live(self._weather)))
        self._tasks.append(asyncio.create_task(self._keep_looking()))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    @property
    def goes_on(self) -> bool:
        """Whether another round is to follow."""
        if self.seconds < self._course.seconds:
            return True
        idle = any(not self._tally.done[kind] for kind in users.kinds(self._streams))
        return idle and self._late_rounds < self._course.late_rounds

    async def round(self) -> None:
        """Steady load, a burst, and a rest."""
        self._late_rounds += self.seconds >= self._course.seconds
        await self._weather.change("steady")
        await self._pass(self._course.steady_seconds)
        await self._weather.change("burst")
        await self._pass(self._course.burst_seconds)
        await self._rest()
        await self._pass(self._course.rest_seconds)

    async def end(self) -> Readings:
        """Let the users go, and return what the metrics say when everybody has gone."""
        await self._weather.change("over")
        *living, _ = self._tasks
        await asyncio.gather(*living)
        return await self._settled()

    def line(self) -> str:
        """Return what is known after a round, for somebody who waits."""
        last, tally = self._samples[-1], self._tally
        return (
            f"{self.seconds / 60:.1f} of {self._course.seconds / 60:g} minutes: "
            f"{tally.completed.total():,} completed, {tally.left:,} left, {tally.refused:,} refused, "
            f"{tally.errors.total()} errors; tritonserver {last.vitals.triton.rss_mib:,.0f} MiB, "
            f"model {last.vitals.model.rss_mib:,.0f} MiB"
        )

    def soaked(self, after: Readings | None, cut_short: str = "") -> Soaked:
        """Return everything. after: what `end` has returned; None, and why, if it hasn't come to that."""
        return Soaked(
            course=self._course,
            streams=self._streams,
            seconds=self._samples[-1].seconds if self._samples else 0.0,
            samples=self._samples,
            rests=self._rests,
            tally=self._tally,
            before=self._before,
            after=after,
            fixed_text=self._fixed_text,
            same_processes=not cut_short and ServerProcesses.of(self._server.pid) == self._processes,
            rows_depend=self._rows_depend,
            cut_short=cut_short,
        )

    async def _rest(self) -> None:
        await self._weather.change("rest")
        while self._tally.busy:
            await self._pass(_POLL_S)
        settled = await self._settled()
        self._rests.append(Rest(self.seconds, settled.levels))

    async def _settled(self) -> Readings:
        settled = await asyncio.to_thread(readings.settled, self._server)
        self._tally.refused += settled.asked
        return settled.readings

    async def _pass(self, seconds: float) -> None:
        """Let time go by, unless somebody has failed who shouldn't."""
        done, _ = await asyncio.wait(self._tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if done:
            raise RuntimeError("a user or the looking has ended before its time")

    async def _keep_looking(self) -> None:
        while True:
            await self._look()
            await asyncio.sleep(self._course.sample_seconds)

    async def _look(self) -> None:
        now = await asyncio.to_thread(readings.read, self._server)
        vitals = await asyncio.to_thread(ServerVitals.of, self._processes)
        moment, generated = time.monotonic(), now.total("llama_generated_tokens_total")
        latencies = self._tally.take_latencies()
        self._samples.append(
            Sample(
                seconds=moment - self._began,
                phase=self._weather.phase,
                vitals=vitals,
                slots_in_use=now.total("llama_slots_in_use"),
                waiting=now.total("llama_waiting_rows"),
                pending=now.total("nv_inference_pending_request_count"),
                tokens_per_second=(generated - self._generated) / max(moment - self._looked, _LAST_LOOK_S),
                answers=len(latencies),
                p95_ms=percentiles(latencies)["p95"] if latencies else None,
            )
        )
        self._looked, self._generated = moment, generated
