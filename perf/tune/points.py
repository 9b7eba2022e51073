"""Points of the search: settings and their measurements; the noise between measurements; which point is best."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from perf.load.summary import percentiles

Measurement = Mapping[str, Any]
"""One measurement, as in a result file. `not_run`: why there is none."""


@dataclass(frozen=True)
class Knobs:
    """The tuned settings, by their names in a result file.

    max_queue_delay_microseconds, preferred_batch_size: Triton's dynamic batcher's; the sizes are dispatched at once,
    ascending, at least one. slots: the config's max_batch_size. prefill_tokens: maximum of padded prompt tokens per
    prefill pass.
    """

    max_queue_delay_microseconds: int
    preferred_batch_size: tuple[int, ...]
    slots: int
    prefill_tokens: int

    def __str__(self) -> str:
        preferred = " ".join(map(str, self.preferred_batch_size))
        batcher = f"delay {self.max_queue_delay_microseconds} us, preferred {preferred}"
        return f"{batcher}, slots {self.slots}, prefill {self.prefill_tokens}"

    def changes(self, other: Knobs) -> int:
        """Return how many settings differ from another point's."""
        return sum(mine != theirs for mine, theirs in zip(asdict(self).values(), asdict(other).values(), strict=True))

    def key(self, run: int) -> str:
        """Return a measurement's key in a result file; run: 1, 2, … of this point."""
        return f"{self}, run {run}"


@dataclass(frozen=True)
class Point:
    """Settings and their measurements. Figures combine all runs: tokens over seconds, percentiles of every request."""

    knobs: Knobs
    runs: Sequence[Measurement]

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,.1f} tokens/s at a p95 of {self.p95_ms:,.0f} ms"

    @property
    def failure(self) -> str:
        """Why this point can't be recommended; "" if it can."""
        for run in self.runs:
            if "not_run" in run:
                return str(run["not_run"])
            if run["errors"]:
                return f"{run['errors']} of {run['requests']} requests failed: {next(iter(run['error_messages']))}"
        return ""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of all runs over their seconds."""
        return float(sum(run["output_tokens"] for run in self.runs) / sum(run["duration_s"] for run in self.runs))

    @property
    def latency_ms(self) -> dict[str, float]:
        """Percentiles over every request."""
        return percentiles([seconds for run in self.runs for seconds in run["latencies_s"]])

    @property
    def p95_ms(self) -> float:
        """The 95th percentile of latency."""
        return self.latency_ms["p95"]


class Noise(NamedTuple):
    """The largest difference between measurements of one point, as a share of their mean; infinite if unknown."""

    throughput: float
    p95: float

    @classmethod
    def of(cls, points: Iterable[Point]) -> Noise:
        """Return the noise over all points that were measured more than once."""

        def spread(values: Sequence[float]) -> float:
            return (max(values) - min(values)) * len(values) / sum(values)

        repeated = [point.runs for point in points if len(point.runs) > 1 and not point.failure]
        return cls(
            max((spread([run["tokens_per_second"] for run in runs]) for runs in repeated), default=math.inf),
            max((spread([run["latency_ms"]["p95"] for run in runs]) for runs in repeated), default=math.inf),
        )


def best(points: Sequence[Point], slo_p95_ms: float, noise: Noise, present: Knobs) -> Point | None:
    """Return the best working point, None if there is none. present: kept unless another one is better.

    A difference within the noise is none, so each criterion keeps every point within the noise of its best: points
    that meet the bound; the highest throughput; the lowest p95; the fewest changes from the present settings. If none
    meets the bound, the lowest p95 decides and the throughput doesn't count.
    """
    left = [point for point in points if not point.failure]
    if not left:
        return None
    if meeting := [point for point in left if point.p95_ms <= slo_p95_ms]:
        highest = max(point.tokens_per_second for point in meeting)
        left = [point for point in meeting if point.tokens_per_second >= highest * (1 - noise.throughput)]
    lowest = min(point.p95_ms for point in left)
    left = [point for point in left if point.p95_ms <= lowest * (1 + noise.p95)]
    return min(left, key=lambda point: (point.knobs.changes(present), -point.tokens_per_second))


def recommended(points: Sequence[Point], slo_p95_ms: float, noise: Noise, present: Knobs) -> Point | None:
    """Return the point to recommend, None if none meets the bound; one measured once only if no repeated one does."""
    for pool in ([point for point in points if len(point.runs) > 1], points):
        found = best(pool, slo_p95_ms, noise, present)
        if found is not None and found.p95_ms <= slo_p95_ms:
            return found
    return None


def pareto(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front of throughput and p95 as measured, regardless of the noise."""
    values = {id(point): (point.tokens_per_second, -point.p95_ms) for point in points if not point.failure}

    def beaten(mine: tuple[float, float]) -> bool:
        return any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in values.values())

    return [point for point in points if id(point) in values and not beaten(values[id(point)])]
