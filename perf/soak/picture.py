"""The samples of a soak as columns of figures, and as a plot over time; grey: rests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from perf.report.canvas import BLUE, FAINT, GREEN, ORANGE, PURPLE, VERMILION, Label, beside, drawing
from perf.soak.soaking import Sample

Columns = Mapping[str, Sequence[Any]]

MOST_ROWS = 150
"""Samples in a result file: a night has thousands, more than a plot has points."""

# Each panel's unit, and its lines: column, name, colour.
_PANELS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "MiB",
        (
            ("model_rss_mib", "model's process", BLUE),
            ("triton_rss_mib", "tritonserver", VERMILION),
            ("vram_mib", "GPU, in use", GREEN),
        ),
    ),
    (
        "open",
        (
            ("triton_descriptors", "descriptors", VERMILION),
            ("triton_threads", "threads", ORANGE),
            ("model_descriptors", "the model's", BLUE),
        ),
    ),
    ("rows", (("slots_in_use", "slots in use", GREEN), ("pending", "in the queue", PURPLE))),
    ("tokens/s", (("tokens_per_second", "tokens/s", GREEN),)),
    ("p95, s", (("p95_ms", "latency", PURPLE),)),
)


def columns(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """Return the samples as columns for a result file, at most MOST_ROWS evenly spaced ones."""
    shown = samples[:: max(1, -(-len(samples) // MOST_ROWS))]
    found: dict[str, list[Any]] = {
        "seconds": [round(sample.seconds, 1) for sample in shown],
        "phase": [sample.phase for sample in shown],
        "shared_memory_mib": [round(sample.server.shared_memory_mib, 2) for sample in shown],
        "vram_mib": [sample.server.vram_mib for sample in shown],
    }
    for process in ("triton", "model"):
        for name in ("rss_mib", "pss_mib", "descriptors", "threads"):
            values = [asdict(sample.server)[process][name] for sample in shown]
            found[f"{process}_{name}"] = [round(value, 2) for value in values]
    for name in ("slots_in_use", "waiting", "pending", "tokens_per_second", "answers", "p95_ms"):
        values = [getattr(sample, name) for sample in shown]
        found[name] = [None if value is None else round(value, 1) for value in values]
    return found


def picture(columns: Columns, subtitle: str) -> str:
    """Return the SVG of a soak's samples. Raises ValueError for fewer than two."""
    seconds = columns["seconds"]
    if len(seconds) < 2:
        raise ValueError(f"{len(seconds)} samples can't be drawn; 2 at least")
    minutes = [value / 60 for value in seconds]
    with drawing("A soak", subtitle, height=8.6, left=0.85, right=1.35, titled=False) as made:
        # The canvas has panels side by side; these are stacked.
        made.panels[0].remove()
        panels = made.figure.subplots(len(_PANELS), 1, sharex=True, gridspec_kw={"hspace": 0.22})
        for axes, (unit, lines) in zip(panels, _PANELS, strict=True):
            _panel(axes, minutes, columns, lines)
            axes.set_ylabel(unit)
            for begin, end in _rests(minutes, columns["phase"]):
                axes.axvspan(begin, end, color=FAINT, linewidth=0, alpha=0.6)
        panels[-1].set_xlabel("minutes")
    return made.svg


def _panel(axes: Axes, minutes: Sequence[float], columns: Columns, lines: Sequence[tuple[str, str, str]]) -> None:
    ends = []
    highest = 0.0
    for column, name, colour in lines:
        # Without an answer there is no latency, and the line has a gap.
        values = [float("nan") if value is None else float(value) for value in columns[column]]
        if column.endswith("_ms"):
            values = [value / 1e3 for value in values]
        known = [value for value in values if value == value]  # not a NaN
        if not known:
            continue
        axes.plot(minutes, values, color=colour, linewidth=1.1)
        ends.append(Label(name, minutes[-1], known[-1], colour))
        highest = max(highest, *known)
    # From zero: a flat line that fills the panel would look like growth.
    axes.set_ylim(0, 1.12 * highest or 1.0)
    axes.set_xlim(0, minutes[-1])
    axes.yaxis.set_major_locator(MaxNLocator(4))
    if ends:
        beside(axes, ends)


def _rests(minutes: Sequence[float], phases: Sequence[str]) -> Iterator[tuple[float, float]]:
    """Yield the begin and end of each rest."""
    began: float | None = None
    for minute, phase in zip(minutes, phases, strict=True):
        if phase == "rest" and began is None:
            began = minute
        elif phase != "rest" and began is not None:
            yield began, minute
            began = None
    if began is not None:
        yield began, minutes[-1]
