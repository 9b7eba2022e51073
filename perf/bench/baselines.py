"""Our server and the baselines under one generator, in a closed loop of mixed lengths and under Poisson arrivals.

Every server is started once and gets all loads: the same requests in the same order, and as many as every other one,
however slow it is. Its pace, measured beforehand, only decides whether there is time for a load. The rate of the open
loop is a share of what our own server answers in the closed one: all get the same rate, and a server that can't keep up
shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from perf.bench.measure import Measurement, Pace, entry, measured_pace
from perf.course import Course, SkippedError
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import drive
from perf.load.summary import SLO
from perf.roofline.rates import DeviceRates
from perf.servers.baselines import servers
from perf.servers.running import Running, Server
from perf.workload import Mix, warm_and_measured

CLOSED: tuple[Mix, ...] = ("uniform", "geometric")
OPEN: Mix = "uniform"
MEASURED = 64
"""Requests of a closed loop, after a warm-up of one request per user."""
OPEN_SHARE = 0.6
"""Of our closed loop's requests per second: a busy server, not an overloaded one."""
OPEN_SECONDS = 45.0
"""Requests keep arriving for this long."""
OPEN_LEAST = 32
"""Requests of the open loop: with fewer, a 95th percentile is a maximum."""
TIMEOUT_S = 900.0
"""For all requests of one load together."""
_SEED = 7
# Beyond what is left of the budget: a load that was predicted to fit may take a little longer.
_GRACE_S = 60.0


class NoRateError(SkippedError):
    """There is no rate to take the open loop's share of; `str()` says why."""


@dataclass(frozen=True)
class Loads:
    """The loads of every server. threads: of each."""

    course: Course
    checkpoint: Path
    concurrency: int
    threads: int
    slo: SLO
    rates: DeviceRates

    def measure(self, chosen: Sequence[Server]) -> None:
        """Measure these servers, as long as the budget lasts."""
        # The slowest one last: if the budget ends there, the least is missing.
        for server in sorted(chosen, key=lambda server: server.key == "naive_fastapi"):
            loads = {f"peers/closed/{mix}/{server.key}": partial(self._closed, server, mix) for mix in CLOSED}
            loads[f"peers/poisson/{OPEN}/{server.key}"] = partial(self._open, server)
            self.course.measure_on_one(server.to_json(), loads, partial(self._paced, server))

    @contextmanager
    def _paced(self, server: Server) -> Iterator[tuple[Running, Pace]]:
        self.course.budget.say(f"{server.key} is started …")
        with server.start(self.checkpoint, self.threads) as running:
            settings = "".join(f"\n  {name}: {value}" for name, value in running.settings.items())
            self.course.budget.say(f"{server.key} runs: {running.command}{settings}")
            yield running, measured_pace(running, self.checkpoint, "equal", self.concurrency, self._timeout)

    def _closed(self, server: Server, mix: Mix, paced: tuple[Running, Pace]) -> Measurement:
        running, pace = paced
        self.course.refuse_without((self.concurrency + MEASURED) * pace.wave_seconds() / self.concurrency)
        return self._apply(server, running, mix, Closed(self.concurrency), self.concurrency, MEASURED)

    def _open(self, server: Server, paced: tuple[Running, Pace]) -> Measurement:
        running, pace = paced
        rate = self._rate()
        count = max(OPEN_LEAST, round(rate * OPEN_SECONDS))
        self.course.refuse_without(max(OPEN_SECONDS, count * pace.wave_seconds() / self.concurrency))
        return self._apply(server, running, OPEN, Poisson(rate, _SEED), 0, count)

    def _apply(
        self, server: Server, running: Running, mix: Mix, arrivals: Closed | Poisson, warmup: int, count: int
    ) -> Measurement:
        requests = warm_and_measured(self.checkpoint, mix, warmup, count)
        run = drive(running.target, requests, arrivals, warmup, self._timeout)
        return entry(server, running, self.checkpoint, mix, run, requests, self.rates, self.slo)

    @property
    def _timeout(self) -> float:
        return min(TIMEOUT_S, max(self.course.budget.left, 0.0) + _GRACE_S)

    def _rate(self) -> float:
        """Return the open loop's requests per second, from the first of our servers with a closed loop's result."""
        for server in servers():
            closed = self.course.results.measurements.get(f"peers/closed/{OPEN}/{server.key}", {})
            rate = closed.get("requests_per_second")
            if server.family == "ours" and isinstance(rate, float) and rate > 0:
                return round(OPEN_SHARE * rate, 3)
        raise NoRateError(f"the rate is a share of our own server's in the closed loop ({OPEN}), which wasn't measured")
