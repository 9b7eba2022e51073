"""Our server and the baselines under one generator, in closed loops of mixed lengths and under Poisson arrivals.

Every server is started once for a section's loads: the same requests in the same order, and as many as every other one,
however slow it is. Its pace, measured beforehand, only decides whether there is time for a load. The rate of the open
loop is a share of what our own server answers in the closed one: all get the same rate, and a server that can't keep up
shows it. Sections: the default users and Poisson arrivals; fewer and more users; a larger model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from perf.bench.measure import Measurement, Pace, entry, measured_pace
from perf.checkpoint import described
from perf.command import CORES
from perf.course import Course, NoTimeError, SkippedError
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import drive
from perf.load.summary import SLO
from perf.roofline.rates import DeviceRates
from perf.servers.baselines import servers
from perf.servers.running import Running, Server
from perf.workload import MEAN_OUTPUT, Mix, warm_and_measured

SLOTS = 32
"""Of every server; and the default users."""
CLOSED: tuple[Mix, ...] = ("uniform", "geometric")
OPEN: Mix = "uniform"
MEASURED = 64
"""Requests of a closed loop, after a warm-up of one request per user."""
USERS = (1, 8, 128)
"""Fewer and more than the default."""
LOAD_S = 300.0
"""A load that is predicted to take longer isn't run: the slowest servers would take the others' time."""
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


class _Started(NamedTuple):
    """A server, and its pace by the number of users."""

    running: Running
    paces: dict[int, Pace]


class NoRateError(SkippedError):
    """There is no rate to take the open loop's share of; `str()` says why."""


class Load(NamedTuple):
    """key: of its measurements, before the server's. users: of a closed loop; None for Poisson arrivals.

    measured: requests of a closed loop, after a warm-up of one per user. mean: output tokens of a request.
    """

    key: str
    mix: Mix
    users: int | None
    measured: int = MEASURED
    mean: int = MEAN_OUTPUT


def peers() -> list[Load]:
    """Return the loads of the default users and of Poisson arrivals."""
    closed = [Load(f"peers/closed/{mix}", mix, SLOTS) for mix in CLOSED]
    return [*closed, Load(f"peers/poisson/{OPEN}", OPEN, None)]


def by_users() -> list[Load]:
    """Return the loads of fewer and more users."""
    return [
        Load(f"users/{mix}/{users}", mix, users, max(8, min(2 * users, MEASURED))) for users in USERS for mix in CLOSED
    ]


def large() -> list[Load]:
    """Return the loads of a larger model: fewer requests of half the tokens, many at a time and one."""
    return [Load(f"large/{many}", OPEN, many, max(4, many), MEAN_OUTPUT // 2) for many in (SLOTS, 1)]


@dataclass(frozen=True)
class Loads:
    """The loads of every server."""

    course: Course
    checkpoint: Path
    slo: SLO
    rates: DeviceRates

    def measure(self, chosen: Sequence[Server], loads: Sequence[Load]) -> None:
        """Measure these servers under these loads, as long as the budget lasts."""
        # The slowest one last: if the budget ends there, the least is missing.
        for server in sorted(chosen, key=lambda server: server.key == "naive_fastapi"):
            tasks = {f"{load.key}/{server.key}": partial(self._apply, server, load) for load in loads}
            self.course.measure_on_one(server.to_json(), tasks, partial(self._started, server))

    @contextmanager
    def _started(self, server: Server) -> Iterator[_Started]:
        self.course.budget.say(f"{server.key} is started …")
        with server.start(self.checkpoint, CORES) as running:
            settings = "".join(f"\n  {name}: {value}" for name, value in running.settings.items())
            self.course.budget.say(f"{server.key} runs: {running.command}{settings}")
            yield _Started(running, {})

    def _apply(self, server: Server, load: Load, started: _Started) -> Measurement:
        arrivals: Closed | Poisson
        if load.users is None:
            rate = self._rate()
            arrivals, warmup, measured = Poisson(rate, _SEED), 0, max(OPEN_LEAST, round(rate * OPEN_SECONDS))
        else:
            arrivals, warmup, measured = Closed(load.users), load.users, load.measured
        self._refuse_without(started, load.users or SLOTS, warmup + measured, load.mean)
        requests = warm_and_measured(self.checkpoint, load.mix, warmup, measured, load.mean)
        run = drive(started.running.target, requests, arrivals, warmup, self._timeout)
        own = {"model": described(self.checkpoint)}
        return entry(server, started.running, self.checkpoint, load.mix, run, requests, self.rates, self.slo, own)

    def _refuse_without(self, started: _Started, users: int, requests: int, mean: int) -> None:
        """Raise NoTimeError if the budget, or what a load may take, is less than the requests are predicted to take."""
        if users not in started.paces:
            started.paces[users] = measured_pace(started.running, self.checkpoint, "equal", users, self._timeout)
        predicted = started.paces[users].seconds(requests, mean)
        self.course.refuse_without(predicted)
        if predicted > LOAD_S:
            raise NoTimeError(f"{requests} requests take {predicted:.0f} s; a load may take {LOAD_S:.0f} s")

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
