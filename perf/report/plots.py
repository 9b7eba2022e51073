"""The plots of docs/benchmarks.md. Each takes a result and returns an SVG, or raises NotMeasuredError.

The same data gives the same bytes. The background is white, so a plot reads on light and dark pages. Letters are
outlines: the reader needs no font.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from perf.report.results import Result, Row
from perf.report.tables import label, lengths
from perf.report.text import figure, percent

# Okabe and Ito's colours, which stay distinct under the common kinds of colour blindness; the second four are darker
# than the originals.
BLUE, GREEN, VERMILION = "#0072b2", "#009e73", "#d55e00"
PURPLE, SKY, GREY, OLIVE = "#b35a8d", "#3a8fc4", "#666666", "#8a8400"
INK, FAINT = "#222222", "#d8d8d8"
_COLOURS = {
    "inflight_int8": BLUE,
    "inflight_fp32": GREEN,
    "inflight_bf16": OLIVE,
    "batched_int8": VERMILION,
    "batched_fp16": PURPLE,
    "naive_fp16": GREY,
    "naive_fp32": SKY,
}

_STYLE: dict[str, object] = {
    "svg.hashsalt": "triton-llama",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": FAINT,
    "grid.linewidth": 0.7,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
    "legend.frameon": False,
    "legend.fontsize": 9,
}
styled = style.context(["default", _STYLE])
"""Decorates what draws: a style of its own, whatever the user's matplotlibrc says."""

_WIDTH = 9.6
"""Inches of every figure."""
_LETTER, _LINE = 0.068, 0.17
"""Approximate inches per letter and per line of the subtitle."""


def panels(
    title: str,
    subtitle: str,
    shape: tuple[int, int] = (1, 1),
    height: float = 4.6,
    left: float = 0.85,
    right: float = 0.25,
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its panels, in `shape` rows and columns; rows share the x axis, columns the y axis.

    height: inches, without what a subtitle takes that is longer than a line. left, right: inches beside the panels.
    """
    lines = textwrap.wrap(subtitle, int((_WIDTH - 0.3) / _LETTER))
    head = 0.78 + _LINE * len(lines)
    height += _LINE * (len(lines) - 1)
    drawn = Figure(figsize=(_WIDTH, height), facecolor="white")
    FigureCanvasSVG(drawn)
    # Margins in inches rather than a layout engine: what it would measure isn't the same everywhere.
    drawn.subplots_adjust(left / _WIDTH, 0.6 / height, 1 - right / _WIDTH, 1 - head / height, wspace=0.12, hspace=0.22)
    drawn.text(0.15 / _WIDTH, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", va="center")
    above = 1 - 0.46 / height
    drawn.text(0.15 / _WIDTH, above, "\n".join(lines), fontsize=9, color="#555555", va="top")
    return drawn, list(drawn.subplots(*shape, squeeze=False, sharex="col", sharey="row").flat)


def svg(drawn: Figure) -> str:
    """Return the figure as an SVG without a date and without spaces at the ends of lines."""
    target = io.StringIO()
    title = drawn.texts[0].get_text()
    drawn.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def by_lengths(result: Result) -> str:
    """Draw tokens/s of the article's servers at each distribution of output lengths."""
    return _grouped(result, result.measured("article/"), "Output lengths: what equal ones hide")


@styled
def _grouped(result: Result, rows: Sequence[Row], title: str) -> str:
    """Draw a panel of bars for each distribution of lengths, on one scale."""
    mixes = {row["load"]["mix"]: lengths(row["load"]) for row in rows}
    load = f"{rows[0]['load']['concurrency']} requests at a time"
    subtitle = f"{result.subject()}; {load}; in brackets: of the device's limit"

    def text(row: Row) -> str:
        return f"{figure(_rate(row))} ({percent(row['limit']['fraction'])})"

    longest = max(map(_rate, rows))
    servers = len({row["server"] for row in rows})
    drawn, each = panels(title, subtitle, (1, len(mixes)), height=1.75 + 0.36 * servers, left=1.9)
    for axes, (mix, name) in zip(each, mixes.items(), strict=True):
        _bars(axes, [row for row in rows if row["load"]["mix"] == mix], _rate, text)
        _horizontal(axes, name, "tokens/s", 1.45 * longest)
    return svg(drawn)


def _rate(row: Row) -> float:
    rate: float = row["tokens_per_second"]
    return rate


def _bars(axes: Axes, rows: Sequence[Row], length: Callable[[Row], float], text: Callable[[Row], str]) -> None:
    """Draw a bar per row, at its server's place in all panels."""
    for row in rows:
        axes.barh(label(row), length(row), height=0.62, color=_COLOURS.get(row["server"], INK))
        _right(axes, text(row), (length(row), label(row)))


def _horizontal(axes: Axes, title: str, unit: str, longest: float) -> None:
    """Finish a panel of bars: its scale, with room for the figures, the first server at the top."""
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.set_xlim(0, longest)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(_plain)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    # Shared by all panels.
    axes.yaxis.set_inverted(True)
    axes.margins(y=0.04)


def _right(axes: Axes, text: str, place: tuple[float, str]) -> None:
    """Write a text to the right of a bar."""
    axes.annotate(text, place, xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)


def _plain(value: float, _: object = None) -> str:
    """Return a tick's figure without needless zeros: 0.5, 10, 2,000."""
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:,g}"
