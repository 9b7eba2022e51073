"""One subject at rising concurrency, on one server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from perf import workload
from perf.analyzer.binary import find
from perf.article import measure, sizes
from perf.article.measure import Measurement
from perf.article.serving import serving
from perf.article.subjects import Subject
from perf.roofline.rates import DeviceRates

CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128)
LEAST = 8
"""Requests at least, where fewer than so many are sent at a time: half a minute of a slow server, alone."""

# The warm-up and one that is measured.
_FEWEST_WAVES = 2


@dataclass(frozen=True)
class Step:
    """One concurrency. measurement: with `not_run` in it where the least that can be measured takes too long."""

    concurrency: int
    measurement: Measurement


def sweep(
    subject: Subject,
    checkpoint: Path,
    mix: workload.Mix,
    concurrencies: Sequence[int],
    seconds: Callable[[int], float],
    threads: int,
    rates: DeviceRates | None,
    mean: int = workload.MEAN_OUTPUT,
) -> Iterator[Step]:
    """Measure the subject at each concurrency, and hand each over once it is there.

    concurrencies: rising. seconds: that one may take; taking the pace comes on top. Raises what
    `serving` and `measure.sized` raise.
    """
    analyzer = find()
    slowest = 0.0
    with serving(subject, checkpoint, threads) as served:
        for concurrency in concurrencies:
            # Not even the pace is taken where the least can't fit: more at a time never make a wave shorter.
            available = seconds(concurrency)
            if _FEWEST_WAVES * slowest > available:
                reason = (
                    f"{_FEWEST_WAVES} waves take at least {_FEWEST_WAVES * slowest:.0f} and not the {available:.0f} s"
                )
                yield Step(concurrency, _not_run(subject, reason))
                continue
            pace = measure.pace(served, mix, concurrency, analyzer)
            slowest = max(slowest, pace.wave_seconds(mean))
            size = sizes.choose(available, pace, mean, LEAST)
            if size.fits:
                yield Step(concurrency, measure.sized(served, mix, concurrency, size, rates, analyzer, mean))
            else:
                yield Step(concurrency, _not_run(subject, size.describe()))


def _not_run(subject: Subject, reason: str) -> Measurement:
    return {"server": subject.key, "title": subject.title, "not_run": reason}
