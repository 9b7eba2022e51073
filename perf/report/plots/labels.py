"""Names written at the ends of lines, in place of a legend, moved apart where they would overlap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

RISE = 4
"""Points that a small figure stands above its point, out of the way of a line that rises to it."""


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
        y += RISE * pixel
        if any(abs(middle - other) < near[0] and abs(y - height) < near[1] for other, height in taken):
            continue
        taken.append((middle, y))
        axes.annotate(
            label.text, (label.x, label.y), xytext=(-5, RISE), textcoords="offset points", va="center", ha="right",
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
