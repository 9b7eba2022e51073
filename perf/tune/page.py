"""What the user reads at the end: a table of the points and what follows from it."""

from __future__ import annotations

import math

from perf.tune.choice import lowest_latency
from perf.tune.findings import Findings, figures
from perf.tune.knobs import sizes
from perf.tune.points import Point

_HEAD = ("delay us", "preferred", "slots", "prefill", "runs", "tokens/s", "p50 ms", "p95 ms", "meets SLO", "Pareto")


def table(findings: Findings) -> str:
    """Return the points as a table, the fastest first and those that failed last."""
    ordered = sorted(findings.points, key=lambda point: 0.0 if point.failure else -point.tokens_per_second)
    rows = [_HEAD, *(_row(findings, point) for point in ordered)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    remarks = ["", *(_remark(findings, point) for point in ordered)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), remark]).rstrip()
        for row, remark in zip(rows, remarks, strict=True)
    )


def conclusion(findings: Findings) -> str:
    """Return what is recommended, or why nothing is, with the figures that it rests on."""
    noise = findings.noise
    if math.isinf(noise.throughput):
        told = "Nothing was measured twice: no difference can be told from noise."
    else:
        told = (
            f"Two measurements of one point differed by up to {noise.throughput:.1%} in tokens/s and {noise.p95:.1%} "
            "in p95; smaller differences don't count."
        )
    point = findings.recommended
    return f"{told}\n{_nothing(findings) if point is None else _something(findings, point)}"


def _nothing(findings: Findings) -> str:
    lowest = lowest_latency(findings.points)
    if lowest is None:
        return "Nothing is recommended: no point could be measured without errors."
    return (
        f"Nothing is recommended: no point has a p95 of at most {findings.slo_p95_ms:,g} ms under this load.\n"
        f"The lowest p95: {figures(lowest)}, with {lowest.knobs.describe()}."
    )


def _something(findings: Findings, point: Point) -> str:
    present = next((other for other in findings.points if other.knobs == findings.subject.knobs), None)
    if point is present:
        said = f"Recommended: the config as it is: {figures(point)}. Nothing is better by more than the noise."
    else:
        said = f"Recommended: {point.knobs.describe()}: {figures(point)}."
        if present is not None and not present.failure:
            said += f" The config as it is: {figures(present)}."
    if len(point.runs) == 1:
        said += " It was measured only once; a larger --budget, with --resume, confirms it or doesn't."
    return said


def _row(findings: Findings, point: Point) -> tuple[str, ...]:
    batcher = point.knobs.batcher
    settings = (
        "-" if batcher is None else str(batcher.delay_microseconds),
        "-" if batcher is None else sizes(batcher.preferred),
        str(point.knobs.slots),
        str(point.knobs.prefill_tokens),
        str(len(point.runs)),
    )
    if point.failure:
        return (*settings, "-", "-", "-", "no", "")
    latency = point.latency_ms
    return (
        *settings,
        f"{point.tokens_per_second:,.1f}",
        f"{latency['p50']:,.0f}",
        f"{latency['p95']:,.0f}",
        "yes" if point.meets(findings.slo_p95_ms) else "no",
        "yes" if point in findings.front else "",
    )


def _remark(findings: Findings, point: Point) -> str:
    remarks = [point.failure] if point.failure else []
    if point.knobs == findings.subject.knobs:
        remarks.append("as it is")
    if point == findings.recommended:
        remarks.append("recommended")
    return ", ".join(remarks)
