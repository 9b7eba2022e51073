"""The samples of a soak as columns of figures, and as a plot over time; grey: rests, dashed: restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.ticker import MaxNLocator

from perf.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, VERMILION, panels, styled, svg
from perf.soak.observed import COLUMNS, Sample
from perf.soak.stack import Part

Columns = Mapping[str, Sequence[Any]]

MOST_ROWS = 150
"""Samples in a result file: a night has thousands, more than a plot has points."""

_PANELS = {
    "MiB": {
        "model_rss_mib": ("model's process", BLUE),
        "triton_rss_mib": ("tritonserver", VERMILION),
        "endpoint_rss_mib": ("OpenAI endpoint", ORANGE),
        "vram_mib": ("GPU, in use", GREEN),
    },
    "open": {
        "triton_descriptors": ("descriptors", VERMILION),
        "triton_threads": ("threads", ORANGE),
        "model_descriptors": ("the model's", BLUE),
        "endpoint_descriptors": ("the endpoint's", PURPLE),
    },
    "rows": {"slots_in_use": ("slots in use", GREEN), "pending": ("in the queue", PURPLE)},
    "tokens/s": {"tokens_per_second": ("tokens/s", GREEN)},
    "p95, ms": {"p95_ms": ("latency", PURPLE)},
}
"""Each panel's unit, and its lines: column, name, colour."""


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the samples as columns for a result file, at most MOST_ROWS evenly spaced ones."""
    shown = samples[:: max(1, -(-len(samples) // MOST_ROWS))]
    figures = [{name: round(value, 2) for name, value in sample.figures.items()} for sample in shown]
    return {
        "seconds": [round(sample.seconds, 1) for sample in shown],
        "phase": [sample.phase for sample in shown],
        "life": [sample.life for sample in shown],
        "endpoint_life": [sample.endpoint_life for sample in shown],
        **{name: [one.get(name) for one in figures] for name in COLUMNS},
    }


@styled
def picture(columns: Columns, subtitle: str) -> str:
    """Return the SVG of a soak's samples. Raises ValueError for fewer than two."""
    minutes = [value / 60 for value in columns["seconds"]]
    if len(minutes) < 2:
        raise ValueError(f"{len(minutes)} samples can't be drawn; 2 at least")
    drawn, stacked = panels("A soak", subtitle, (len(_PANELS), 1), height=8.6, right=1.7)
    for axes, (unit, lines) in zip(stacked, _PANELS.items(), strict=True):
        axes.set_ylabel(unit)
        axes.set_xlim(0, minutes[-1])
        for (minute, next_one), phase in zip(pairwise(minutes), columns["phase"], strict=False):
            if phase == "rest":
                axes.axvspan(minute, next_one, color=FAINT, linewidth=0, alpha=0.6)
        for at, part in _restarts(minutes, columns):
            axes.axvline(at, color=VERMILION if part == "server" else ORANGE, linewidth=0.8, linestyle="--")
        for column, (name, colour) in lines.items():
            # Without an answer there is no latency, and the line has a gap.
            values = [float("nan") if value is None else value for value in columns[column]]
            if any(value is not None for value in columns[column]):
                axes.plot(minutes, values, color=colour, linewidth=1.1, label=name)
        # From zero: a flat line that fills the panel would look like growth.
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if axes.lines:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    stacked[-1].set_xlabel("minutes")
    return svg(drawn)


def _restarts(minutes: Sequence[float], columns: Columns) -> Iterator[tuple[float, Part]]:
    lives = list(zip(minutes, columns["life"], columns["endpoint_life"], strict=True))
    for (_, life, endpoint_life), (minute, next_life, next_endpoint_life) in pairwise(lives):
        if (life, endpoint_life) != (next_life, next_endpoint_life):
            yield minute, "server" if life != next_life else "endpoint"
