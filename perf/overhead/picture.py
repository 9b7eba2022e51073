"""The picture of an account: each whole a bar, its parts below it, as wide as they took long.

Made from the parts of a result's file alone. Parts too narrow for their name have none; the table names them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle

from perf.overhead.parts import PartJSON, unit
from perf.report.plots.canvas import drawing
from perf.report.plots.palette import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILION

_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
_WIDTH = 9.6
_ROW = 0.3
"""Inches a row."""
_LETTER = 0.065
"""Inches a letter takes, about."""
_MARGINS = 0.95 + 0.6
"""Inches above and below."""


@dataclass(frozen=True)
class _Box:
    """A part's place: left and width as shares of its whole, depth below it."""

    label: str
    left: float
    width: float
    depth: int
    colour: tuple[float, float, float]


def picture(parts: Sequence[PartJSON], subtitle: str) -> str:
    """Return the SVG of an account's parts. Raises ValueError if there are none."""
    if not parts:
        raise ValueError("an account without parts can't be drawn")
    wholes = [part for part in parts if not part["parent"]]
    blocks = [list(_boxes(parts, whole)) for whole in wholes]
    # With half a row of air behind each.
    rows = [max(box.depth for box in block) + 1.5 for block in blocks]
    height = _MARGINS + _ROW * sum(rows)
    with drawing("Where the time goes", subtitle, width=_WIDTH, height=height, left=0.15) as made:
        (axes,) = made.panels
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(sum(rows), 0)
        top = 0.0
        for block, taken in zip(blocks, rows, strict=True):
            _draw(axes, block, top)
            top += taken
    return made.svg


def _draw(axes: Axes, block: Sequence[_Box], top: float) -> None:
    for box in block:
        place = (box.left, top + box.depth)
        axes.add_patch(Rectangle(place, box.width, 0.94, facecolor=box.colour, edgecolor="white", linewidth=0.6))
        label = _fitting(box)
        if label:
            axes.text(box.left + 0.004, place[1] + 0.47, label, va="center", fontsize=8, color=INK, clip_on=True)


def _boxes(parts: Sequence[PartJSON], whole: PartJSON) -> Iterator[_Box]:
    said = f"{whole['name']}: {whole['seconds']:.3g} {unit(whole)}, {whole['per_token_us']:,.0f} µs per token"
    yield _Box(said, 0.0, 1.0, 0, _pale(GREY, 0))
    left = 0.0
    for index, part in enumerate(_below(parts, whole)):
        colour = GREY if _is_rest(part) else _COLOURS[index % len(_COLOURS)]
        yield from _tree(parts, part, left, 1, colour)
        left += max(part["share"], 0.0)


def _tree(parts: Sequence[PartJSON], part: PartJSON, left: float, depth: int, colour: str) -> Iterator[_Box]:
    # Below zero is what a rest can come to where independent measurements are put together; it has no width.
    width = max(part["share"], 0.0)
    yield _Box(f"{part['name'].rsplit('/', 1)[-1]} {100 * width:.1f} %", left, width, depth, _pale(colour, depth))
    for below in _below(parts, part):
        yield from _tree(parts, below, left, depth + 1, GREY if _is_rest(below) else colour)
        left += max(below["share"], 0.0)


def _below(parts: Sequence[PartJSON], above: PartJSON) -> list[PartJSON]:
    return [part for part in parts if part["parent"] == above["name"]]


def _is_rest(part: PartJSON) -> bool:
    return part["name"].rsplit("/", 1)[-1].startswith("the rest of ")


def _fitting(box: _Box) -> str:
    """Return as much of the label as fits: all, without the share, or nothing."""
    room = box.width * (_WIDTH - 0.4) / _LETTER - 1
    short = box.label.rsplit(" ", 2)[0] if box.label.endswith("%") else box.label
    return next((label for label in (box.label, short) if len(label) <= room), "")


def _pale(colour: str, depth: int) -> tuple[float, float, float]:
    """Return the colour mixed with white, so that black letters stay readable on it, the paler the deeper."""
    share = 0.5 + 0.08 * depth
    red, green, blue = (one * (1 - share) + share for one in to_rgb(colour))
    return red, green, blue
