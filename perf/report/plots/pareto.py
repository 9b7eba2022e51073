"""The points of a search over settings, and the front that none of them beats."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from perf.report.plots.axes import plain
from perf.report.plots.canvas import drawing
from perf.report.plots.palette import BLUE, GREY, INK, VERMILION
from perf.report.points import TunePoint, bound, load, points
from perf.report.run import Run

_KEY = 3.3
"""Inches at the right, for what the numbers at the points stand for."""


def pareto(run: Run) -> str | None:
    """Draw tokens/s over p95 for every point, the Pareto front, the recommended point and the bound on p95.

    The points of the front are numbered and their settings listed beside: on a real front they lie close together.
    """
    found = points(run)
    if not found:
        return None
    subtitle = f"{run.origin.subject}; {load(run).arrivals}; new tokens: {load(run).title}; up and left is better"
    shown = sorted((point for point in found if point.pareto or point.recommended), key=lambda point: point.p95)
    with drawing("Settings: throughput and latency", subtitle, right=_KEY, titled=False) as made:
        axes = made.panels[0]
        axes.set_xlabel("p95 latency of a request, s")
        axes.set_ylabel("tokens/s")
        axes.xaxis.set_major_formatter(lambda value, _: plain(value))
        axes.yaxis.set_major_formatter(lambda value, _: plain(value))
        axes.margins(0.1)
        _line(axes, [point for point in found if not point.pareto], GREY, "o")
        _line(axes, [point for point in shown if point.pareto], BLUE, "-o")
        for number, point in enumerate(shown, start=1):
            if point.recommended:
                axes.plot([point.p95], [point.tokens_per_second], "*", color=VERMILION, markersize=14)
            axes.annotate(
                str(number), (point.p95, point.tokens_per_second), xytext=(-5, 6), textcoords="offset points",
                ha="right", fontsize=9, color=_colour(point),
            )  # fmt: skip
        most = bound(run)
        axes.axvline(most, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
        axes.annotate(
            f"bound: {plain(most)} s", (most, 0), xycoords=("data", "axes fraction"), xytext=(4, 6),
            textcoords="offset points", fontsize=9,
        )  # fmt: skip
        _key(axes, shown)
    return made.svg


def _line(axes: Axes, found: Sequence[TunePoint], colour: str, style: str) -> None:
    axes.plot(
        [point.p95 for point in found], [point.tokens_per_second for point in found], style, color=colour, alpha=0.8
    )


def _key(axes: Axes, shown: Sequence[TunePoint]) -> None:
    """List the numbered points' settings at the right of the panel, those that all of them share once."""
    shared = {name for name in shown[0].settings if len({point.settings.get(name) for point in shown}) == 1}
    lines = [
        (f"{number}  {point.described(set(point.settings) - shared) or 'as below'}", _colour(point))
        for number, point in enumerate(shown, start=1)
    ]
    lines.append((f"all: {shown[0].described(shared)}" if shared else "", INK))
    if any(point.recommended for point in shown):
        lines.append(("★ recommended", VERMILION))
    for place, (text, colour) in enumerate(lines):
        axes.annotate(
            text, (1, 1), xycoords="axes fraction", xytext=(12, -14 * place - 6), textcoords="offset points",
            fontsize=8.5, color=colour, annotation_clip=False,
        )  # fmt: skip


def _colour(point: TunePoint) -> str:
    return VERMILION if point.recommended else BLUE
