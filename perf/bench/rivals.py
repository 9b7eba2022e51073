"""The peers: ours and theirs under one generator, in a closed loop of mixed lengths and under Poisson arrivals.

Every contestant is started once and gets all loads, the same requests in the same order. The rate of the open loop is a
share of what our INT8 server answers in the closed one: all get the same rate, and whoever can't keep up shows it.
"""

from __future__ import annotations

from pathlib import Path

from article import sizes
from article.sizes import Pace, Size
from limit.rates import DeviceRates
from load.arrivals import Closed, Poisson
from peers.contestant import Contestant, NotRunError
from peers.lineup import lineup
from peers.measure import Server, not_run, opened
from setting.workload import MEAN_OUTPUT, Mix

from bench.articles import START_S
from bench.course import Course, Measurement, NoTimeError
from bench.options import Options

CLOSED: tuple[Mix, ...] = ("uniform", "geometric")
OPEN: Mix = "uniform"
OPEN_SHARE = 0.6
"""Of our closed loop's requests per second: a server that is busy and not overloaded."""
OPEN_SECONDS = 45.0
"""So long requests keep coming."""
_SHORT, _LONG = 4, 20
_SEED = 7


def peers(course: Course, options: Options, checkpoint: Path, rates: DeviceRates, seconds: float) -> None:
    """Measure everyone who takes part; so many seconds are for all of them together."""
    # The slowest one last: should the time end there, what is missing is the least of all.
    contestants = sorted(
        (one for one in lineup() if one.key not in options.without), key=lambda one: one.key == "naive_fastapi"
    )
    until = course.budget.spent + seconds
    for number, contestant in enumerate(contestants):
        share = (until - course.budget.spent) / (len(contestants) - number)
        keys = [*(f"peers/closed/{mix}/{contestant.key}" for mix in CLOSED), f"peers/poisson/{OPEN}/{contestant.key}"]
        if all(course.has(key) for key in keys):
            course.budget.say(f"{contestant.key}: there already")
            continue
        if course.budget.left < START_S:
            for key in keys:
                left = max(course.budget.left, 0)
                course.note(key, {**_name(contestant), "not_run": f"{left:.0f} s are left of --budget"})
            continue
        course.budget.say(f"{contestant.key} is started …")
        try:
            with opened(contestant, checkpoint, options.threads) as server:
                _loads(course, options, rates, server, keys, share)
        except NotRunError as error:
            for key in keys:
                course.note(key, not_run(contestant, error))


def _loads(
    course: Course, options: Options, rates: DeviceRates, server: Server, keys: list[str], seconds: float
) -> None:
    pace = _pace(server, options.concurrency)
    closed = Closed(options.concurrency)

    def loop(mix: Mix) -> Measurement:
        size = sizes.choose(seconds / (len(CLOSED) + 1), pace, MEAN_OUTPUT)
        _refuse_without_time(course, size)
        return server.measure(mix, closed, size.requests, size.warmup, options.slo, rates)

    def open_loop() -> Measurement:
        rate = _rate(course)
        count = max(sizes.LEAST, round(rate * OPEN_SECONDS))
        return server.measure(OPEN, Poisson(rate, _SEED), count, 0, options.slo, None)

    name = _name(server.contestant)
    for key, mix in zip(keys, CLOSED, strict=False):
        course.measure(key, name, lambda mix=mix: loop(mix))  # type: ignore[misc]
    course.measure(keys[-1], name, open_loop)


def _rate(course: Course) -> float:
    """Return the open loop's rate, in requests per second, from the first contestant's closed loop."""
    ours = course.results.measurements.get(f"peers/closed/{OPEN}/{lineup()[0].key}", {})
    closed = ours.get("requests_per_second")
    if not isinstance(closed, float):
        raise NoTimeError("the open loop's rate is a share of our own server's, which wasn't measured")
    return round(OPEN_SHARE * closed, 3)


def _pace(server: Server, concurrency: int) -> Pace:
    """Return the server's pace, from two waves of short requests; they also warm it up."""

    def wave(mean: int) -> float:
        found = server.measure("equal", Closed(concurrency), concurrency, 0, None, None, mean=mean)
        if found["errors"]:
            raise NotRunError(
                f"{found['errors']} of its first {concurrency} requests failed: {found.get('error_messages')}"
            )
        seconds = found["duration_s"]
        assert isinstance(seconds, float)
        return seconds

    # The longer one first: what only a fresh server does then makes the prediction longer, not shorter.
    long = wave(_LONG)
    return Pace(concurrency, _SHORT, wave(_SHORT), _LONG, long)


def _refuse_without_time(course: Course, size: Size) -> None:
    if size.predicted_s > course.budget.left:
        raise NoTimeError(
            f"the least that can be measured takes about {size.predicted_s:.0f} s; "
            f"{max(course.budget.left, 0):.0f} s are left of --budget"
        )


def _name(contestant: Contestant) -> dict[str, object]:
    return {
        "server": contestant.key,
        "title": contestant.title,
        "family": contestant.family,
        "weights": contestant.weights.upper(),
    }
