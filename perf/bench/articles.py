"""The article's two tables: its three configurations and ours, at equal and at mixed lengths, by perf_analyzer.

Every entry has a fresh server of its own. On a CPU the mixed lengths are measured without the subjects in FP16: it
computes 16 bits many times slower than 32, and what that costs is in the table of equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch

from perf.analyzer.binary import find
from perf.article import measure, sizes
from perf.article.serving import serving
from perf.article.subjects import Subject, subjects
from perf.course import Course, Measurement
from perf.roofline.rates import DeviceRates
from perf.workload import MEAN_OUTPUT, Mix

START_S = 30.0
"""With less than that left no server is started."""


class Asked(Protocol):
    """What the tables have to know of a run's options. concurrency: requests at a time. threads: of a server."""

    @property
    def concurrency(self) -> int: ...  # noqa: D102

    @property
    def threads(self) -> int: ...  # noqa: D102


def tables(
    course: Course,
    asked: Asked,
    checkpoint: Path,
    rates: DeviceRates,
    mixes: Sequence[Mix],
    seconds: float,
    ordered: Callable[[Sequence[Subject]], Sequence[Subject]] = tuple,
) -> None:
    """Measure every subject under every mix; so many seconds are for all of them together.

    ordered: puts the subjects in the order in which they are measured, the article's if nobody says otherwise.
    """
    chosen = ordered(subjects())
    tasks = [(mix, subject) for mix in mixes for subject in chosen if mix == "equal" or not _emulated(subject)]
    until = course.budget.spent + seconds
    for number, (mix, subject) in enumerate(tasks):
        share = (until - course.budget.spent) / (len(tasks) - number)
        course.measure(
            f"article/{mix}/{subject.key}",
            subject.to_json(),
            lambda mix=mix, subject=subject, share=share: _measure(  # type: ignore[misc]
                course, asked, checkpoint, rates, subject, mix, share
            ),
        )


def _measure(
    course: Course,
    asked: Asked,
    checkpoint: Path,
    rates: DeviceRates,
    subject: Subject,
    mix: Mix,
    seconds: float,
) -> Measurement:
    course.refuse_without(START_S)
    with serving(subject, checkpoint, asked.threads, course.budget.left) as served:
        analyzer = find()
        pace = measure.pace(served, mix, asked.concurrency, analyzer)
        size = sizes.choose(seconds, pace, MEAN_OUTPUT)
        course.refuse_without(size.predicted_s)
        return measure.sized(served, mix, asked.concurrency, size, rates, analyzer)


def _emulated(subject: Subject) -> bool:
    return subject.weights == "fp16" and not torch.cuda.is_available()
