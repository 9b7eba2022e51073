"""A figure and how it becomes an SVG: the same data, the same bytes.

White ground, so that it reads on a light page and on a dark one. Letters are outlines: no font has to be on the
reader's machine, and nothing moves because one isn't. Nothing in the file depends on when or where it was made.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from matplotlib import rc, rc_context, rcdefaults
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from perf.report.plots.palette import FAINT, INK

_LETTER, _LINE = 0.068, 0.17
"""Inches that a letter of the subtitle takes, about, and a line of it."""


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
