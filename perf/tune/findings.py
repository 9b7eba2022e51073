"""The outcome of a search: the recommended point and its config, for the result file and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from perf.tune.config import Subject, edited
from perf.tune.measuring import Demand
from perf.tune.points import Noise, Point, pareto, recommended

TUNED = "tuned"
"""The variant name to save the recommended config under."""


@dataclass(frozen=True)
class Findings:
    """The points of a search and its conditions. model: as given by the user, None for the benchmarks' own."""

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
    def config(self) -> str | None:
        """The recommended config, with comments that state what it was chosen for."""
        point = self.recommended
        if point is None:
            return None
        return (
            f"# Tuned from the config {self.subject.variant!r} for a p95 of at most {self.slo_p95_ms:g} ms,\n"
            f"# measured with {self.demand.in_words()}:\n# {point.figures}, on {self.device}.\n"
        ) + edited(self.subject.text, point.knobs)

    @property
    def command(self) -> str:
        """The command that serves the recommended config once it is saved."""
        return f"make serve VARIANT={TUNED}{'' if self.model is None else f' MODEL={self.model}'}"

    def sections(self) -> dict[str, object]:
        """Return the result file's sections beside the measurements."""
        point, front = self.recommended, pareto(self.points)
        chosen = point and {"settings": asdict(point.knobs), "config": self.config, "command": self.command}
        return {
            "slo_p95_ms": self.slo_p95_ms,
            # JSON has no infinity.
            "noise": None if math.isinf(self.noise.throughput) else asdict(self.noise),
            "points": [self._in_json(one, one in front) for one in self.points],
            "recommended": chosen,
        }

    def _in_json(self, point: Point, on_front: bool) -> dict[str, object]:
        latency = {} if point.failure else point.latency_ms
        return {
            "settings": asdict(point.knobs),
            # Of the first measurement; the others end in run2, run3.
            "key": point.knobs.key(1),
            "repeats": len(point.runs),
            "tokens_per_second": None if point.failure else round(point.tokens_per_second, 2),
            "p50_ms": latency.get("p50"),
            "p95_ms": latency.get("p95"),
            "pareto": on_front,
            "meets_slo": point.meets(self.slo_p95_ms),
            "failure": point.failure or None,
        }


def conclusion(findings: Findings) -> str:
    """Return the recommendation, or why there is none, with its figures."""
    noise, point = findings.noise, findings.recommended
    told = "Nothing was measured twice: differences can't be told from noise."
    if not math.isinf(noise.throughput):
        told = (
            f"Two measurements of one point differed by up to {noise.throughput:.1%} in tokens/s and {noise.p95:.1%} "
            "in p95; smaller differences don't count."
        )
    return f"{told}\n{_nothing(findings) if point is None else _recommendation(findings, point)}"


def _nothing(findings: Findings) -> str:
    working = [point for point in findings.points if not point.failure]
    if not working:
        return "Nothing is recommended: no point could be measured without errors."
    lowest = min(working, key=lambda point: point.p95_ms)
    return (
        f"Nothing is recommended: no point has a p95 of at most {findings.slo_p95_ms:,g} ms under this load.\n"
        f"The lowest p95: {lowest.figures}, with {lowest.knobs.describe()}."
    )


def _recommendation(findings: Findings, point: Point) -> str:
    present = next((other for other in findings.points if other.knobs == findings.subject.knobs), None)
    if point is present:
        text = f"Recommended: the present config: {point.figures}. Nothing is better by more than the noise."
    else:
        text = f"Recommended: {point.knobs.describe()}: {point.figures}."
        if present is not None and not present.failure:
            text += f" The present config: {present.figures}."
    if len(point.runs) == 1:
        text += " It was measured only once; repeat with --resume and a larger --budget to confirm it."
    return text
