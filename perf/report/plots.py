"""The plot of docs/benchmarks.md: tokens/s of the article's servers at each distribution of output lengths.

The same data gives the same bytes. The background is white, so it reads on light and dark pages. Letters are outlines:
the reader needs no font.
"""

from __future__ import annotations

import io
import textwrap

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from perf.report.results import Result, Row
from perf.report.tables import label, lengths
from perf.report.text import figure, percent

TITLE = "Output lengths: what equal ones hide"
# Okabe and Ito's colours, which stay distinct under the common kinds of colour blindness; the last four are darker than
# the originals.
_COLOURS = {
    "inflight_int8": "#0072b2",
    "inflight_fp32": "#009e73",
    "batched_int8": "#d55e00",
    "inflight_bf16": "#8a8400",
    "batched_fp16": "#b35a8d",
    "naive_fp16": "#666666",
    "naive_fp32": "#3a8fc4",
}
_INK = "#222222"
_STYLE: dict[str, object] = {
    "svg.hashsalt": "triton-llama",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "text.color": _INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": _INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#d8d8d8",
    "grid.linewidth": 0.7,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
}
_WIDTH = 9.6
"""Inches of the figure."""


@style.context(["default", _STYLE])  # whatever the user's matplotlibrc says
def by_lengths(result: Result) -> str:
    """Return an SVG with a panel of bars for each distribution of lengths, on one scale. Raises NotMeasuredError."""
    rows = result.measured("article/")
    mixes = {row["load"]["mix"]: lengths(row["load"]) for row in rows}
    load = f"{rows[0]['load']['concurrency']} requests at a time"
    drawn, panels = _panels(
        f"{result.subject()}; {load}; in brackets: of the device's limit",
        len(mixes),
        1.75 + 0.36 * len({row["server"] for row in rows}),
    )
    longest = max(row["tokens_per_second"] for row in rows)
    for axes, (mix, name) in zip(panels, mixes.items(), strict=True):
        _bars(axes, [row for row in rows if row["load"]["mix"] == mix])
        axes.set_title(name)
        axes.set_xlabel("tokens/s")
        # With room for the figures.
        axes.set_xlim(0, 1.45 * longest)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.yaxis.set_inverted(True)
        axes.margins(y=0.04)
    target = io.StringIO()
    drawn.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Title": TITLE})
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def _panels(subtitle: str, count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels beside each other. height: inches, of a subtitle of one line."""
    lines = textwrap.wrap(subtitle, 136)
    head = 0.78 + 0.17 * len(lines)
    height += 0.17 * (len(lines) - 1)
    drawn = Figure(figsize=(_WIDTH, height), facecolor="white")
    FigureCanvasSVG(drawn)
    # Margins in inches rather than a layout engine: what it would measure isn't the same everywhere.
    drawn.subplots_adjust(1.9 / _WIDTH, 0.6 / height, 1 - 0.25 / _WIDTH, 1 - head / height, wspace=0.12, hspace=0.22)
    drawn.text(0.15 / _WIDTH, 1 - 0.3 / height, TITLE, fontsize=13, fontweight="bold", va="center")
    drawn.text(0.15 / _WIDTH, 1 - 0.46 / height, "\n".join(lines), fontsize=9, color="#555555", va="top")
    return drawn, list(drawn.subplots(1, count, squeeze=False, sharex="col", sharey="row").flat)


def _bars(axes: Axes, rows: list[Row]) -> None:
    """Draw a bar per row, at its server's place in all panels, with its figure to the right."""
    for row in rows:
        rate, limit = row["tokens_per_second"], percent(row["limit"]["fraction"])
        axes.barh(label(row), rate, height=0.62, color=_COLOURS.get(row["server"], _INK))
        place = (rate, label(row))
        text = f"{figure(rate)} ({limit})"
        axes.annotate(text, place, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
