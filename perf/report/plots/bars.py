"""Horizontal bars, a panel a mix of output lengths and a row a server: names once, at the left, figures at the bars."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from perf.report.measurement import Measurement
from perf.report.plots.axes import plain
from perf.report.plots.palette import Look


@dataclass(frozen=True)
class Bars:
    """A panel. length: of a server's bar, None where it has none. text: what stands at its end."""

    title: str
    unit: str
    length: Callable[[Measurement], float | None]
    text: Callable[[Measurement], str]


@dataclass(frozen=True)
class Names:
    """The rows from top to bottom: the servers' names in results, and their labels."""

    servers: Sequence[str]
    titles: Sequence[str]

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> Names:
        """Return every server once, in the order of the measurements."""
        titles = {row.server: row.label for row in measurements}
        return cls(list(titles), list(titles.values()))


def draw(
    axes: Axes,
    bars: Bars,
    names: Names,
    measurements: Sequence[Measurement],
    looks: dict[str, Look],
    longest: float,
) -> None:
    """Draw one panel of those servers' bars; a server without a figure keeps its row, and gets a dash.

    longest: the longest bar of all panels that are to be compared.
    """
    for row in measurements:
        place = names.servers.index(row.server)
        length = bars.length(row)
        if length is not None:
            axes.barh(place, length, height=0.62, color=looks[row.server].colour)
        axes.annotate(
            "–" if length is None else bars.text(row), (length or 0, place), xytext=(4, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
    axes.set_title(bars.title)
    axes.set_xlabel(bars.unit)
    # Room for the figures.
    axes.set_xlim(0, 1.45 * longest)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: plain(value)))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_yticks(range(len(names.titles)), names.titles)
    axes.set_ylim(len(names.titles) - 0.5, -0.5)
