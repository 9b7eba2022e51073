"""The peers: ours and theirs under one generator, in a closed loop of mixed lengths and under Poisson arrivals.

Every contestant is started once and gets all loads: the same requests in the same order, and as many of them as every
other one, however slow it is. Its pace, seen beforehand, decides only whether there is time for a load. The rate of the
open loop is a share of what our own server answers in the closed one: all get the same rate, and whoever can't keep up
shows it.

What can't be run is in the results with its reason, and the next one goes on. So is what comes after a load that wasn't
answered whole in its time: the server may still be at work on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from perf.article.sizes import Pace
from perf.bench.articles import START_S
from perf.bench.options import Options
from perf.course import Course, Measurement, NoTimeError, reason
from perf.load.arrivals import Closed, Poisson
from perf.peers.contestant import Contestant
from perf.peers.lineup import lineup
from perf.peers.measure import TIMEOUT_S, Server, opened
from perf.roofline.rates import DeviceRates
from perf.workload import MEAN_OUTPUT, Mix

CLOSED: tuple[Mix, ...] = ("uniform", "geometric")
OPEN: Mix = "uniform"
MEASURED = 64
"""Requests of a closed loop, after as many for the warm-up as are sent at a time."""
OPEN_SHARE = 0.6
"""Of our closed loop's requests per second: a server that is busy and not overloaded."""
OPEN_SECONDS = 45.0
"""So long requests keep coming."""
OPEN_LEAST = 32
"""Requests of the open loop: with fewer, a 95th percentile is a maximum."""
_SHORT, _LONG = 4, 20
_SEED = 7
# Over what is left of the budget: a load that was predicted to fit may take a little longer.
_GRACE_S = 60.0


class NoRateError(Exception):
    """The open loop has no rate to take a share of; `str()` says why."""


class StillAtWorkError(Exception):
    """The server hasn't answered a load in its time, so no other one may follow."""


@dataclass(frozen=True)
class _Load:
    """key: in the results."""

    key: str
    mix: Mix
    arrivals: Literal["closed", "poisson"]


def peers(course: Course, options: Options, checkpoint: Path, rates: DeviceRates) -> None:
    """Measure everyone who takes part, as long as the budget has time for it."""
    # The slowest one last: should the time end there, what is missing is the least of all.
    contestants = sorted(
        (one for one in lineup() if one.key not in options.without), key=lambda one: one.key == "naive_fastapi"
    )
    for contestant in contestants:
        loads = [load for load in _loads(contestant) if not course.has(load.key)]
        if loads:
            _turn(course, options, checkpoint, rates, contestant, loads)
        else:
            course.budget.say(f"{contestant.key}: there already")


def _loads(contestant: Contestant) -> Iterator[_Load]:
    for mix in CLOSED:
        yield _Load(f"peers/closed/{mix}/{contestant.key}", mix, "closed")
    yield _Load(f"peers/poisson/{OPEN}/{contestant.key}", OPEN, "poisson")


def _turn(
    course: Course,
    options: Options,
    checkpoint: Path,
    rates: DeviceRates,
    contestant: Contestant,
    loads: list[_Load],
) -> None:
    """Start a contestant, put it under these loads, stop it. Every load has an entry in the results afterwards."""
    left = list(loads)
    try:
        course.refuse_without(START_S)
        course.budget.say(f"{contestant.key} is started …")
        with opened(contestant, checkpoint, options.threads) as server:
            course.budget.say(f"{contestant.key} runs: {server.started.describe()}")
            pace = _pace(course, server, options.concurrency)
            while left:
                course.budget.say(f"{left[0].key} …")
                found = _measured(course, options, rates, server, pace, left[0])
                course.note(left.pop(0).key, found)
                if found.get("unanswered"):
                    raise StillAtWorkError(
                        f"{found['unanswered']} requests of the load before weren't answered in time"
                    )
    except Exception as error:  # noqa: BLE001 - many libraries have a say; it is in the results, and printed
        for load in left:
            course.note(load.key, {**contestant.to_json(), "not_run": reason(error)})
        if not left:
            course.budget.say(f"{contestant.key}, after its last load: {reason(error)}")


def _measured(
    course: Course, options: Options, rates: DeviceRates, server: Server, pace: Pace, load: _Load
) -> Measurement:
    """Put the server under the load; a load that can't be begun, while others may, says so in the measurement."""
    try:
        if load.arrivals == "closed":
            return _closed(course, options, rates, server, pace, load.mix)
        return _open(course, options, server, pace)
    except (NoTimeError, NoRateError) as error:
        return {**server.contestant.to_json(), "not_run": reason(error)}


def _closed(course: Course, options: Options, rates: DeviceRates, server: Server, pace: Pace, mix: Mix) -> Measurement:
    concurrency = options.concurrency
    course.refuse_without((concurrency + MEASURED) * _request_seconds(pace))
    arrivals = Closed(concurrency)
    return server.measure(mix, arrivals, MEASURED, concurrency, options.slo, rates, _timeout(course))


def _open(course: Course, options: Options, server: Server, pace: Pace) -> Measurement:
    rate = _rate(course)
    count = max(OPEN_LEAST, round(rate * OPEN_SECONDS))
    course.refuse_without(max(OPEN_SECONDS, count * _request_seconds(pace)))
    return server.measure(OPEN, Poisson(rate, _SEED), count, 0, options.slo, None, _timeout(course))


def _rate(course: Course) -> float:
    """Return the open loop's rate, in requests per second, from the first of ours that has a closed loop's."""
    for contestant in lineup():
        closed = course.results.measurements.get(f"peers/closed/{OPEN}/{contestant.key}", {}).get("requests_per_second")
        if contestant.family == "ours" and isinstance(closed, float) and closed > 0:
            return round(OPEN_SHARE * closed, 3)
    raise NoRateError(f"the rate is a share of our own server's in the closed loop ({OPEN}), which wasn't measured")


def _pace(course: Course, server: Server, concurrency: int) -> Pace:
    """Return the server's pace, from two waves of short requests; they also warm it up."""
    # The longer one first: what only a fresh server does then makes the prediction longer, not shorter.
    long = server.wave_seconds(concurrency, _LONG, _timeout(course))
    return Pace(concurrency, _SHORT, server.wave_seconds(concurrency, _SHORT, _timeout(course)), _LONG, long)


def _request_seconds(pace: Pace) -> float:
    """Return how long the server should need for each of many requests."""
    return pace.wave_seconds(MEAN_OUTPUT) / pace.concurrency


def _timeout(course: Course) -> float:
    return min(TIMEOUT_S, max(course.budget.left, 0.0) + _GRACE_S)
