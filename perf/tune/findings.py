"""The outcome of a search: the recommended point and its config, for the result file and for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perf.report.text import Column, terminal
from perf.report.text import table as table_of
from perf.tune.config import Subject, edited
from perf.tune.measuring import Demand
from perf.tune.points import Noise, Point, run_key, sizes
from perf.tune.search import lowest_latency, pareto, recommended

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
    def front(self) -> list[Point]:
        """The Pareto front."""
        return pareto(self.points)

    @property
    def config(self) -> str | None:
        """The recommended config, with comments that state what it was chosen for."""
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
        """The command that serves the recommended config once it is saved."""
        return f"make serve VARIANT={TUNED}{'' if self.model is None else f' MODEL={self.model}'}"

    def sections(self) -> dict[str, object]:
        """Return the result file's sections beside the measurements."""
        point = self.recommended
        chosen = point and {"settings": point.knobs.settings(), "config": self.config, "command": self.command}
        return {
            "slo_p95_ms": self.slo_p95_ms,
            # JSON has no infinity.
            "noise": None if math.isinf(self.noise.throughput) else vars(self.noise),
            "points": [self._in_json(one) for one in self.points],
            "recommended": chosen,
        }

    def _in_json(self, point: Point) -> dict[str, object]:
        latency = {} if point.failure else point.latency_ms
        return {
            "settings": point.knobs.settings(),
            # Of the first measurement; the others end in run2, run3.
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
    """Return a working point's figures in words."""
    return f"{point.tokens_per_second:,.1f} tokens/s at a p95 of {point.p95_ms:,.0f} ms"


def table(findings: Findings) -> str:
    """Return the points for a terminal, fastest first, failed ones last."""

    def remark(point: Point) -> str:
        remarks = [point.failure] if point.failure else []
        remarks += ["present config"] if point.knobs == findings.subject.knobs else []
        return ", ".join([*remarks, *(["recommended"] if point == findings.recommended else [])])

    ordered = sorted(findings.points, key=lambda point: 0.0 if point.failure else -point.tokens_per_second)
    columns = [
        Column[Point](
            "delay us", lambda one: None if one.knobs.batcher is None else str(one.knobs.batcher.delay_microseconds)
        ),
        Column[Point](
            "preferred", lambda one: None if one.knobs.batcher is None else sizes(one.knobs.batcher.preferred)
        ),
        Column[Point]("slots", lambda one: str(one.knobs.slots)),
        Column[Point]("prefill", lambda one: str(one.knobs.prefill_tokens)),
        Column[Point]("runs", lambda one: str(len(one.runs))),
        Column[Point]("tokens/s", lambda one: None if one.failure else f"{one.tokens_per_second:,.1f}"),
        Column[Point]("p50 ms", lambda one: None if one.failure else f"{one.latency_ms['p50']:,.0f}"),
        Column[Point]("p95 ms", lambda one: None if one.failure else f"{one.p95_ms:,.0f}"),
        Column[Point]("meets SLO", lambda one: "yes" if one.meets(findings.slo_p95_ms) else "no"),
        Column[Point]("Pareto", lambda one: "yes" if one in findings.front else ""),
        Column[Point]("", remark, right=False),
    ]
    return terminal(table_of(columns, ordered, []))


def conclusion(findings: Findings) -> str:
    """Return the recommendation, or why there is none, with its figures."""
    noise, point = findings.noise, findings.recommended
    if math.isinf(noise.throughput):
        told = "Nothing was measured twice: differences can't be told from noise."
    else:
        told = (
            f"Two measurements of one point differed by up to {noise.throughput:.1%} in tokens/s and {noise.p95:.1%} "
            "in p95; smaller differences don't count."
        )
    return f"{told}\n{_nothing(findings) if point is None else _recommendation(findings, point)}"


def _nothing(findings: Findings) -> str:
    lowest = lowest_latency(findings.points)
    if lowest is None:
        return "Nothing is recommended: no point could be measured without errors."
    return (
        f"Nothing is recommended: no point has a p95 of at most {findings.slo_p95_ms:,g} ms under this load.\n"
        f"The lowest p95: {figures(lowest)}, with {lowest.knobs.describe()}."
    )


def _recommendation(findings: Findings, point: Point) -> str:
    present = next((other for other in findings.points if other.knobs == findings.subject.knobs), None)
    if point is present:
        text = f"Recommended: the present config: {figures(point)}. Nothing is better by more than the noise."
    else:
        text = f"Recommended: {point.knobs.describe()}: {figures(point)}."
        if present is not None and not present.failure:
            text += f" The present config: {figures(present)}."
    if len(point.runs) == 1:
        text += " It was measured only once; repeat with --resume and a larger --budget to confirm it."
    return text
