"""What the plots share: the figure and its SVG, axes, labels at the ends of lines, and each server's colour.

The same data gives the same bytes. The background is white, so a plot reads on light and dark pages. Letters are
outlines: the reader needs no font.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from matplotlib import rc, rc_context, rcdefaults
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

_LETTER, _LINE = 0.068, 0.17
"""Approximate inches per letter and per line of the subtitle."""
_RISE = 4
"""Points between a small figure and its point, clear of a line that rises to the point."""

# Okabe and Ito's colours, which stay distinct under the common kinds of colour blindness.
BLUE, GREEN, VERMILION, PURPLE, ORANGE, SKY, GREY = (
    "#0072b2",
    "#009e73",
    "#d55e00",
    "#b35a8d",  # darker than the original: it also colours text
    "#b87f00",  # likewise
    "#3a8fc4",  # likewise
    "#666666",
)
INK, FAINT = "#222222", "#d8d8d8"


@dataclass(frozen=True)
class Look:
    """A server's colour, and a marker that tells the lines apart in black and white."""

    colour: str
    marker: str


# What is compared across plots (the INT8 default, the baselines) keeps its colour in all of them.
_KNOWN = {
    "inflight_int8": Look(BLUE, "o"),
    "triton_llama_int8": Look(BLUE, "o"),
    "inflight_fp32": Look(GREEN, "s"),
    "triton_llama_fp32": Look(GREEN, "s"),
    "batched_int8": Look(VERMILION, "^"),
    "batching_fastapi": Look(VERMILION, "^"),
    "batched_fp16": Look(PURPLE, "v"),
    "transformers_serve": Look(PURPLE, "v"),
    "naive_fp16": Look(GREY, "D"),
    "naive_fastapi": Look(GREY, "D"),
    "vllm": Look(ORANGE, "P"),
}
_OTHERS = (Look(SKY, "X"), Look(INK, "*"), Look(ORANGE, "h"))


def looks(servers: Sequence[str]) -> dict[str, Look]:
    """Return each server's look; unknown servers share three."""
    others = [server for server in dict.fromkeys(servers) if server not in _KNOWN]
    return {server: _KNOWN.get(server) or _OTHERS[others.index(server) % len(_OTHERS)] for server in servers}


@dataclass
class Drawing:
    """A figure under way: its panels from left to right, and the SVG once the block is left."""

    figure: Figure
    panels: Sequence[Axes]
    svg: str = ""


@contextmanager
def drawing(
    title: str,
    subtitle: str,
    *,
    width: float = 9.6,
    height: float = 4.6,
    panels: int = 1,
    left: float = 0.85,
    right: float = 0.25,
    titled: bool = True,
) -> Iterator[Drawing]:
    """Give a figure of that size in inches, higher by what a subtitle takes that is longer than a line.

    left, right: inches before the first panel and behind the last one. titled: the panels have titles of their own.
    """
    # A style of its own, whatever the user's matplotlibrc says.
    with rc_context():
        rcdefaults()
        _style()
        lines = textwrap.wrap(subtitle, int((width - 0.3) / _LETTER))
        more = _LINE * (len(lines) - 1)
        height += more
        figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasSVG(figure)
        # Margins in inches rather than a layout engine: what it would measure isn't the same everywhere.
        figure.subplots_adjust(
            left=left / width,
            right=1 - right / width,
            top=1 - ((0.95 if titled else 0.75) + more) / height,
            bottom=0.6 / height,
            wspace=0.12,
        )
        figure.text(0.15 / width, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", va="center")
        for number, line in enumerate(lines):
            below = 0.56 + _LINE * number
            figure.text(0.15 / width, 1 - below / height, line, fontsize=9, color="#555555", va="center")
        axes = figure.subplots(1, panels, squeeze=False, sharey=panels > 1)[0]
        made = Drawing(figure, list(axes))
        yield made
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None, "Creator": None, "Title": title})
        made.svg = "\n".join(line.rstrip() for line in target.getvalue().splitlines()) + "\n"


def _style() -> None:
    rc("svg", hashsalt="triton-llama", fonttype="path")
    rc("font", family="DejaVu Sans", size=10)  # comes with matplotlib
    rc("text", color=INK)
    rc("axes", edgecolor="#888888", labelcolor=INK, titlesize=10, titlelocation="left", grid=True, axisbelow=True)
    rc("axes.spines", top=False, right=False)
    rc("grid", color=FAINT, linewidth=0.7)
    rc("xtick", color=INK, labelsize=9)
    rc("ytick", color=INK, labelsize=9)
    rc("lines", linewidth=1.8, markersize=5)


def plain(value: float) -> str:
    """Return a tick's figure without needless zeros: 0.5, 10, 2,000."""
    return f"{value:,.0f}" if value >= 1 and value == round(value) else f"{value:,g}"


def decades(axis: Axis) -> None:
    """Mark 1, 2 and 5 of each decade of a logarithmic axis."""
    axis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))


def doublings(axis: Axis, values: list[int]) -> None:
    """Mark exactly these values of a logarithmic axis."""
    axis.set_ticks(values, [plain(value) for value in values])
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())


def horizontal(axes: Axes, title: str, unit: str, longest: float) -> None:
    """Prepare a panel of horizontal bars or ranges up to `longest`, with no grid between the rows."""
    axes.set_title(title)
    axes.set_xlabel(unit)
    axes.set_xlim(0, longest)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


@dataclass(frozen=True)
class Label:
    """A name at a data point."""

    text: str
    x: float
    y: float
    colour: str


def beside(axes: Axes, labels: Sequence[Label], points: float = 9) -> None:
    """Write each name to the right of its point, no two closer to each other than a line of that size.

    To be called when the axes' scales and limits are final.
    """
    # Limits are computed when they are asked for, and the transformation doesn't ask.
    axes.get_xlim(), axes.get_ylim()
    pixels = axes.transData.transform([(label.x, label.y) for label in labels])
    # From points to the pixels of the figure.
    line = 1.3 * points * axes.figure.dpi / 72
    heights = apart([float(y) for _, y in pixels], line)
    for label, pixel, height in zip(labels, pixels, heights, strict=True):
        moved = (height - float(pixel[1])) * 72 / axes.figure.dpi
        axes.annotate(
            label.text, (label.x, label.y), xytext=(7, moved), textcoords="offset points", va="center",
            fontsize=points, color=label.colour, annotation_clip=False,
        )  # fmt: skip


def numbers(axes: Axes, labels: Sequence[Label], points: float = 6.5) -> None:
    """Write each figure small, to the left of its point; one that would touch another figure or a point is left out.

    To be called when the axes' scales and limits are final.
    """
    axes.get_xlim(), axes.get_ylim()
    pixel = axes.figure.dpi / 72
    places = [(float(x), float(y)) for x, y in axes.transData.transform([(label.x, label.y) for label in labels])]
    taken = list(places)
    for label, (x, y) in zip(labels, places, strict=True):
        wide = 0.65 * points * len(label.text)
        middle = x - (5 + wide / 2) * pixel
        near = ((wide / 2 + 3) * pixel, (points / 2 + 2) * pixel)
        y += _RISE * pixel
        if any(abs(middle - other) < near[0] and abs(y - height) < near[1] for other, height in taken):
            continue
        taken.append((middle, y))
        axes.annotate(
            label.text, (label.x, label.y), xytext=(-5, _RISE), textcoords="offset points", va="center", ha="right",
            fontsize=points, color=label.colour,
        )  # fmt: skip


def apart(wanted: Sequence[float], distance: float) -> list[float]:
    """Return heights in the same order, each pair at least `distance` apart, moved as little as it takes.

    Neighbours that are too close form a group that spreads around its own middle; groups that meet are joined.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    groups: list[list[int]] = []
    for index in order:
        groups.append([index])
        while len(groups) > 1 and _start(groups[-1], wanted, distance) < _stop(groups[-2], wanted, distance) + distance:
            last = groups.pop()
            groups[-1] += last
    placed = list(wanted)
    for group in groups:
        start = _start(group, wanted, distance)
        for number, index in enumerate(group):
            placed[index] = start + number * distance
    return placed


def _start(group: Sequence[int], wanted: Sequence[float], distance: float) -> float:
    middle = sum(wanted[index] for index in group) / len(group)
    return middle - distance * (len(group) - 1) / 2


def _stop(group: Sequence[int], wanted: Sequence[float], distance: float) -> float:
    return _start(group, wanted, distance) + distance * (len(group) - 1)
