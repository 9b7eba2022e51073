"""Our server and the baselines under one generator, in a closed loop of mixed lengths and under Poisson arrivals.

Every server is started once and gets all loads: the same requests in the same order, and as many as every other one,
however slow it is. Its pace, measured beforehand, only decides whether there is time for a load. The rate of the open
loop is a share of what our own server answers in the closed one: all get the same rate, and a server that can't keep up
shows it.

A server that can't run is recorded with the reason, and the next one follows. The same holds after a load that was not
answered in time: the server may still be computing it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from perf.article.sizes import Pace
from perf.bench.articles import START_S
from perf.bench.options import Options
from perf.bench.session import TIMEOUT_S, Session, opened
from perf.course import Course, Measurement, NoTimeError, reason
from perf.load.arrivals import Closed, Poisson
from perf.roofline.rates import DeviceRates
from perf.servers.baselines import servers
from perf.servers.server import Server
from perf.workload import MEAN_OUTPUT, Mix

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
_SHORT, _LONG = 4, 20
_SEED = 7
# Beyond what is left of the budget: a load that was predicted to fit may take a little longer.
_GRACE_S = 60.0


class NoRateError(Exception):
    """There is no rate to take the open loop's share of; `str()` says why."""


class StillAtWorkError(Exception):
    """The server has not answered a load in time, so no other one may follow."""


@dataclass(frozen=True)
class _Part:
    """What every load of this part of the run needs."""

    course: Course
    options: Options
    rates: DeviceRates

    def closed(self, session: Session, pace: Pace, mix: Mix) -> Measurement:
        """Measure a closed loop."""
        concurrency = self.options.concurrency
        self.course.refuse_without((concurrency + MEASURED) * _request_seconds(pace))
        return session.measure(
            mix, Closed(concurrency), MEASURED, concurrency, self.options.slo, self.rates, self.timeout
        )

    def open(self, session: Session, pace: Pace) -> Measurement:
        """Measure the open loop."""
        rate = self._rate()
        count = max(OPEN_LEAST, round(rate * OPEN_SECONDS))
        self.course.refuse_without(max(OPEN_SECONDS, count * _request_seconds(pace)))
        return session.measure(OPEN, Poisson(rate, _SEED), count, 0, self.options.slo, None, self.timeout)

    def pace(self, session: Session) -> Pace:
        """Measure the server's pace with two waves of short requests, which also warm it up."""
        concurrency = self.options.concurrency
        # The longer one first: one-time work of a fresh server makes the prediction longer, not shorter.
        long = session.wave_seconds(concurrency, _LONG, self.timeout)
        return Pace(concurrency, _SHORT, session.wave_seconds(concurrency, _SHORT, self.timeout), _LONG, long)

    @property
    def timeout(self) -> float:
        """Seconds for a load."""
        return min(TIMEOUT_S, max(self.course.budget.left, 0.0) + _GRACE_S)

    def _rate(self) -> float:
        """Return the open loop's requests per second, from the first of our servers with a closed loop's result."""
        for server in servers():
            closed = self.course.results.measurements.get(f"peers/closed/{OPEN}/{server.key}", {})
            rate = closed.get("requests_per_second")
            if server.family == "ours" and isinstance(rate, float) and rate > 0:
                return round(OPEN_SHARE * rate, 3)
        raise NoRateError(f"the rate is a share of our own server's in the closed loop ({OPEN}), which wasn't measured")


def baselines(course: Course, options: Options, checkpoint: Path, rates: DeviceRates) -> None:
    """Measure every server, as long as the budget lasts."""
    # The slowest one last: if the budget ends there, the least is missing.
    chosen = [server for server in servers() if server.key not in options.without]
    for server in sorted(chosen, key=lambda server: server.key == "naive_fastapi"):
        loads: list[tuple[str, Mix | None]] = [(f"peers/closed/{mix}/{server.key}", mix) for mix in CLOSED]
        loads.append((f"peers/poisson/{OPEN}/{server.key}", None))
        missing = [load for load in loads if not course.has(load[0])]
        if missing:
            _measure(_Part(course, options, rates), checkpoint, server, missing)
        else:
            course.budget.say(f"{server.key}: there already")


def _measure(part: _Part, checkpoint: Path, server: Server, loads: list[tuple[str, Mix | None]]) -> None:
    """Start a server, apply these loads, stop it. Every load has an entry in the results afterwards.

    loads: the key, and the mix of a closed loop; None is the open one.
    """
    course, left = part.course, list(loads)
    try:
        course.refuse_without(START_S)
        course.budget.say(f"{server.key} is started …")
        with opened(server, checkpoint, part.options.threads) as session:
            course.budget.say(f"{server.key} runs: {session.running.describe()}")
            pace = part.pace(session)
            while left:
                key, mix = left[0]
                course.budget.say(f"{key} …")
                try:
                    found = part.open(session, pace) if mix is None else part.closed(session, pace, mix)
                except (NoTimeError, NoRateError) as error:
                    found = {**server.to_json(), "not_run": reason(error)}
                course.note(key, found)
                left.pop(0)
                if found.get("unanswered"):
                    raise StillAtWorkError(f"{found['unanswered']} requests of the last load weren't answered in time")
    except Exception as error:  # noqa: BLE001 - any library may raise; the reason is recorded and printed
        for key, _ in left:
            course.note(key, {**server.to_json(), "not_run": reason(error)})
        if not left:
            course.budget.say(f"{server.key}, after its last load: {reason(error)}")


def _request_seconds(pace: Pace) -> float:
    """Return the predicted seconds per request of a long load."""
    return pace.wave_seconds(MEAN_OUTPUT) / pace.concurrency
