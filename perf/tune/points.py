"""What is known of a point: its measurements, taken together, and how far two measurements of one point lie apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.load.summary import percentiles
from perf.tune.knobs import Knobs

Measurement = Mapping[str, Any]
"""What was measured once, as in a result's JSON. `not_run`: why there was nothing to measure."""


@dataclass(frozen=True)
class Point:
    """Settings and their measurements.

    The figures are of all measurements together: tokens over seconds, percentiles over every request.
    """

    knobs: Knobs
    runs: Sequence[Measurement]

    @property
    def failure(self) -> str:
        """Why this point can't be recommended, in a few words; "" if it can."""
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
        """95 of 100 requests took at most so long."""
        return self.latency_ms["p95"]

    def meets(self, slo_p95_ms: float) -> bool:
        """Say whether the point works and its p95 is within the bound."""
        return not self.failure and self.p95_ms <= slo_p95_ms


@dataclass(frozen=True)
class Noise:
    """How far two measurements of one point were apart at most, as a share of their mean; infinite if unknown."""

    throughput: float
    p95: float


def measured_noise(points: Iterable[Point]) -> Noise:
    """Return the largest distance that was seen at any point measured more than once."""
    repeated = [point for point in points if len(point.runs) > 1 and not point.failure]
    if not repeated:
        return Noise(math.inf, math.inf)
    return Noise(
        throughput=max(_spread([run["tokens_per_second"] for run in point.runs]) for point in repeated),
        p95=max(_spread([run["latency_ms"]["p95"] for run in point.runs]) for point in repeated),
    )


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) * len(values) / sum(values)
