"""The article's two tables: its three configurations and ours, at equal and at mixed lengths, by perf_analyzer.

Every entry has a fresh server of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analyzer.binary import find
from article import measure, sizes
from article.serving import serving
from article.subjects import Subject, subjects
from article.sweep import CONCURRENCIES, sweep
from limit.rates import DeviceRates
from setting.workload import MEAN_OUTPUT, Mix

from bench.course import Course, Measurement, NoTimeError
from bench.options import Options

START_S = 30.0
"""With less than that left no server is started."""


def tables(
    course: Course, options: Options, checkpoint: Path, rates: DeviceRates, mixes: Sequence[Mix], seconds: float
) -> None:
    """Measure every subject under every mix; so many seconds are for all of them together."""
    tasks = [(mix, subject) for mix in mixes for subject in subjects()]
    until = course.budget.spent + seconds
    for number, (mix, subject) in enumerate(tasks):
        share = (until - course.budget.spent) / (len(tasks) - number)
        course.measure(
            f"article/{mix}/{subject.key}",
            _name(subject),
            lambda mix=mix, subject=subject, share=share: _measure(  # type: ignore[misc]
                course, options, checkpoint, rates, subject, mix, share
            ),
        )


def sweeps(course: Course, options: Options, checkpoint: Path, rates: DeviceRates, seconds: float) -> None:
    """Measure the subjects of --sweep at every concurrency, each on one server; a concurrency takes at most `seconds`.

    Raises ValueError for an unknown subject.
    """
    known = {subject.key: subject for subject in subjects()}
    if unknown := [key for key in options.sweep if key not in known]:
        raise ValueError(f"--sweep has {unknown[0]!r}: known are {', '.join(known)}")
    for key in options.sweep:
        left = [number for number in CONCURRENCIES if not course.has(f"sweep/{key}/{number}")]
        if not left:
            continue
        course.budget.say(f"sweep of {key} at {', '.join(map(str, left))} …")
        try:
            for step in sweep(known[key], checkpoint, "uniform", left, seconds, options.threads, rates):
                course.note(f"sweep/{key}/{step.concurrency}", step.measurement)
                if course.budget.left < seconds:
                    course.budget.say(f"sweep of {key}: the time is over")
                    break
        except Exception as error:  # noqa: BLE001 - as in Course.measure
            course.budget.say(f"sweep of {key}: {type(error).__name__}: {error}")


def _measure(
    course: Course,
    options: Options,
    checkpoint: Path,
    rates: DeviceRates,
    subject: Subject,
    mix: Mix,
    seconds: float,
) -> Measurement:
    if course.budget.left < START_S:
        raise NoTimeError(f"{max(course.budget.left, 0):.0f} s are left of --budget")
    with serving(subject, checkpoint, options.threads) as served:
        analyzer = find()
        pace = measure.pace(served, mix, options.concurrency, analyzer)
        size = sizes.choose(seconds, pace, MEAN_OUTPUT)
        if size.predicted_s > course.budget.left:
            raise NoTimeError(
                f"the least that can be measured takes about {size.predicted_s:.0f} s; "
                f"{max(course.budget.left, 0):.0f} s are left of --budget"
            )
        return measure.sized(served, mix, options.concurrency, size, rates, analyzer)


def _name(subject: Subject) -> dict[str, object]:
    return {"server": subject.key, "title": subject.title, "family": "ours", "weights": subject.weights.upper()}
