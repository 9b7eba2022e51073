"""Our server and the baselines under one generator, in closed loops of mixed lengths.

Every server is started once for a section's loads: the same requests in the same order, and as many as every other one,
however slow it is. Its pace, measured beforehand, only decides whether there is time for a load. Sections: the default
users; fewer and more users; a larger model.
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
from perf.course import Course, NoTimeError
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.roofline.rates import DeviceRates
from perf.servers.running import Running, Server
from perf.workload import MEAN_OUTPUT, Mix, warm_and_measured

SLOTS = 32
"""Of every server; and the default users."""
MIXES: tuple[Mix, ...] = ("uniform", "geometric")
MEASURED = 64
"""Requests of a closed loop, after a warm-up of one request per user."""
USERS = (1, 8, 128)
"""Fewer and more than the default."""
LOAD_S = 300.0
"""A load that is predicted to take longer isn't run: the slowest servers would take the others' time."""
TIMEOUT_S = 900.0
"""For all requests of one load together."""
# Beyond what is left of the budget: a load that was predicted to fit may take a little longer.
_GRACE_S = 60.0


class _Started(NamedTuple):
    """A server, and its pace by the number of users."""

    running: Running
    paces: dict[int, Pace]


class Load(NamedTuple):
    """A closed loop. key: of its measurements, before the server's.

    measured: requests after a warm-up of one per user. mean: output tokens of a request.
    """

    key: str
    mix: Mix
    users: int
    measured: int = MEASURED
    mean: int = MEAN_OUTPUT


def at_default_users() -> list[Load]:
    """Return the loads of the default users."""
    return [Load(f"peers/closed/{mix}", mix, SLOTS) for mix in MIXES]


def by_users() -> list[Load]:
    """Return the loads of fewer and more users."""
    return [
        Load(f"users/{mix}/{users}", mix, users, max(8, min(2 * users, MEASURED))) for users in USERS for mix in MIXES
    ]


def large() -> list[Load]:
    """Return the loads of a larger model: fewer requests of half the tokens, many at a time and one."""
    return [Load(f"large/{many}", "uniform", many, max(4, many), MEAN_OUTPUT // 2) for many in (SLOTS, 1)]


@dataclass(frozen=True)
class Loads:
    """The loads of every server."""

    course: Course
    checkpoint: Path
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
        self._refuse_without(started, load.users, load.users + load.measured, load.mean)
        requests = warm_and_measured(self.checkpoint, load.mix, load.users, load.measured, load.mean)
        run = drive(started.running.target, requests, Closed(load.users), load.users, self._timeout)
        measurement = entry(server, started.running, self.checkpoint, load.mix, run, requests, self.rates)
        return {**measurement, "model": described(self.checkpoint)}

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
