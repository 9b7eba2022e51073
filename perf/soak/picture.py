"""The samples of a soak as columns of figures, and as a plot over time; grey: rests, dashed: restarts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.ticker import MaxNLocator

from perf.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, VERMILION, panels, styled, svg
from perf.soak.observed import Sample
from perf.soak.stack import Part

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
    """Return at most MOST_ROWS evenly spaced samples as columns for a result file; None where a sample lacks one."""
    shown = samples[:: max(1, -(-len(samples) // MOST_ROWS))]
    names = dict.fromkeys(name for sample in shown for name in sample)
    values = {name: [sample.get(name) for sample in shown] for name in names}
    return {name: [round(one, 2) if isinstance(one, float) else one for one in its] for name, its in values.items()}


@styled
def picture(samples: Sequence[Sample], subtitle: str) -> str:
    """Return the SVG of a soak's samples, of which there are two at least."""
    looks = columns(samples)
    minutes = [value / 60 for value in looks["seconds"]]
    drawn, stacked = panels("A soak", subtitle, (len(_PANELS), 1), height=8.6, right=1.7)
    for axes, (unit, lines) in zip(stacked, _PANELS.items(), strict=True):
        axes.set_ylabel(unit)
        axes.set_xlim(0, minutes[-1])
        for (minute, next_one), phase in zip(pairwise(minutes), looks["phase"], strict=False):
            if phase == "rest":
                axes.axvspan(minute, next_one, color=FAINT, linewidth=0, alpha=0.6)
        for at, part in _restarts(minutes, looks):
            axes.axvline(at, color=VERMILION if part == "server" else ORANGE, linewidth=0.8, linestyle="--")
        for column, (name, colour) in lines.items():
            # Without an answer there is no latency, and the line has a gap.
            values = [float("nan") if value is None else value for value in looks.get(column, [])]
            if values:
                axes.plot(minutes, values, color=colour, linewidth=1.1, label=name)
        # From zero: a flat line that fills the panel would look like growth.
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if axes.lines:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    stacked[-1].set_xlabel("minutes")
    return svg(drawn)


def _restarts(minutes: Sequence[float], looks: Mapping[str, Sequence[Any]]) -> Iterator[tuple[float, Part]]:
    lives = list(zip(minutes, looks["life"], looks["endpoint_life"], strict=True))
    for (_, life, endpoint_life), (minute, next_life, next_endpoint_life) in pairwise(lives):
        if (life, endpoint_life) != (next_life, next_endpoint_life):
            yield minute, "server" if life != next_life else "endpoint"
