"""A point of the search: its settings and measurements; and the noise between measurements of one point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perf.load.summary import percentiles

Measurement = Mapping[str, Any]
"""One measurement, as in a result file. `not_run`: why there is none."""


@dataclass(frozen=True)
class Batcher:
    """Triton's dynamic batcher. preferred: batch sizes that are dispatched at once, ascending, at least one."""

    delay_microseconds: int
    preferred: tuple[int, ...]


@dataclass(frozen=True)
class Knobs:
    """The tuned settings.

    batcher: None without dynamic batching. slots: the config's max_batch_size. prefill_tokens: maximum of padded prompt
    tokens per prefill pass.
    """

    batcher: Batcher | None
    slots: int
    prefill_tokens: int

    def settings(self) -> dict[str, object]:
        """Return the settings by their names in the config."""
        return {
            "max_queue_delay_microseconds": None if self.batcher is None else self.batcher.delay_microseconds,
            "preferred_batch_size": None if self.batcher is None else list(self.batcher.preferred),
            "slots": self.slots,
            "prefill_tokens": self.prefill_tokens,
        }

    def describe(self) -> str:
        """Return the settings in words."""
        batcher = "no batcher"
        if self.batcher is not None:
            batcher = f"delay {self.batcher.delay_microseconds} us, preferred {sizes(self.batcher.preferred)}"
        return f"{batcher}, slots {self.slots}, prefill {self.prefill_tokens}"

    def changes(self, other: Knobs) -> int:
        """Return how many settings differ from another point's."""
        mine, theirs = self.settings(), other.settings()
        return sum(mine[name] != theirs[name] for name in mine)


def run_key(knobs: Knobs, run: int) -> str:
    """Return a measurement's key in a result file; run: 1, 2, … of this point."""
    batcher = "no-batcher"
    if knobs.batcher is not None:
        batcher = f"delay{knobs.batcher.delay_microseconds}/preferred{sizes(knobs.batcher.preferred, '-')}"
    return f"{batcher}/slots{knobs.slots}/prefill{knobs.prefill_tokens}/run{run}"


def sizes(preferred: tuple[int, ...], separator: str = " ") -> str:
    """Return preferred sizes as text: "4 8 16"."""
    return separator.join(map(str, preferred))


@dataclass(frozen=True)
class Point:
    """Settings and their measurements. Figures combine all runs: tokens over seconds, percentiles of every request."""

    knobs: Knobs
    runs: Sequence[Measurement]

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

    def meets(self, slo_p95_ms: float) -> bool:
        """Return whether the point works and its p95 is within the bound."""
        return not self.failure and self.p95_ms <= slo_p95_ms


@dataclass(frozen=True)
class Noise:
    """The largest difference between measurements of one point, as a share of their mean; infinite if unknown."""

    throughput: float
    p95: float


def measured_noise(points: Iterable[Point]) -> Noise:
    """Return the noise over all points that were measured more than once."""
    repeated = [point for point in points if len(point.runs) > 1 and not point.failure]
    if not repeated:
        return Noise(math.inf, math.inf)
    return Noise(
        throughput=max(_spread([run["tokens_per_second"] for run in point.runs]) for point in repeated),
        p95=max(_spread([run["latency_ms"]["p95"] for run in point.runs]) for point in repeated),
    )


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) * len(values) / sum(values)
