"""What a search has come to: the recommended point and its config, and what of it goes into the result's JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perf.tune.choice import pareto, recommended
from perf.tune.config import edited
from perf.tune.demand import Demand
from perf.tune.knobs import run_key
from perf.tune.points import Noise, Point
from perf.tune.subject import Subject

TUNED = "tuned"
"""The name that the recommended config is to be saved under, beside the other variants."""


@dataclass(frozen=True)
class Findings:
    """The points, and what they were measured for.

    model: the checkpoint as the user named it, None for the benchmarks' own. device: what computed.
    """

    subject: Subject
    model: str | None
    demand: Demand
    slo_p95_ms: float
    device: str
    points: Sequence[Point]
    noise: Noise

    @property
    def recommended(self) -> Point | None:
        """The point to recommend; None if none meets the bound."""
        return recommended(self.points, self.slo_p95_ms, self.noise, self.subject.knobs)

    @property
    def front(self) -> list[Point]:
        """The points that no other one beats."""
        return pareto(self.points)

    @property
    def config(self) -> str | None:
        """The recommended config, ready to be saved; its first lines say what it was chosen for."""
        point = self.recommended
        if point is None:
            return None
        provenance = (
            f"Tuned from the config {self.subject.variant!r} for a p95 of at most {self.slo_p95_ms:g} ms,",
            f"measured with {self.demand.in_words()}:",
            f"{figures(point)}, on {self.device}.",
        )
        return "".join(f"# {line}\n" for line in provenance) + edited(self.subject.text, point.knobs)

    @property
    def command(self) -> str:
        """How to serve the recommended config once it is saved."""
        return f"make serve VARIANT={TUNED}{'' if self.model is None else f' MODEL={self.model}'}"

    def sections(self) -> dict[str, object]:
        """Return the sections of the result's JSON that lie beside the measurements."""
        point = self.recommended
        return {
            "slo_p95_ms": self.slo_p95_ms,
            # JSON has no infinity.
            "noise": None if math.isinf(self.noise.throughput) else vars(self.noise),
            "points": [self._in_json(point) for point in self.points],
            "recommended": None
            if point is None
            else {"settings": point.knobs.settings(), "config": self.config, "command": self.command},
        }

    def _in_json(self, point: Point) -> dict[str, object]:
        latency = {} if point.failure else point.latency_ms
        return {
            "settings": point.knobs.settings(),
            # Of its first measurement; the others end in run2, run3.
            "key": run_key(point.knobs, 1),
            "repeats": len(point.runs),
            "tokens_per_second": None if point.failure else round(point.tokens_per_second, 2),
            "p50_ms": latency.get("p50"),
            "p95_ms": latency.get("p95"),
            "pareto": point in self.front,
            "meets_slo": point.meets(self.slo_p95_ms),
            "failure": point.failure or None,
        }


def figures(point: Point) -> str:
    """Return a working point's figures as a part of a sentence."""
    return f"{point.tokens_per_second:,.1f} tokens/s at a p95 of {point.p95_ms:,.0f} ms"
