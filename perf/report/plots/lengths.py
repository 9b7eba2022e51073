"""Tokens/s at the three mixes of output lengths: what equal lengths hide."""

from __future__ import annotations

from perf.report.cells import figure, percent
from perf.report.measurement import Measurement
from perf.report.plots.bars import Bars, Names, draw
from perf.report.plots.canvas import drawing
from perf.report.plots.palette import looks
from perf.report.run import Run


def lengths(run: Run) -> str | None:
    """Draw tokens/s of the article's servers at each mix of output lengths."""
    return grouped(run, run.measured("article"), "Output lengths: what equal ones hide")


def peers(run: Run) -> str | None:
    """Draw tokens/s of the peers in a closed loop at each mix of output lengths."""
    return grouped(run, run.measured("peers", "closed"), "The same model in other servers, closed loop")


def grouped(run: Run, measured: list[Measurement], title: str) -> str | None:
    """Draw a panel for each mix of lengths; None if there are none."""
    if not measured:
        return None
    names = Names.of(measured)
    mixes = list(dict.fromkeys(row.load.mix for row in measured))
    subtitle = f"{run.origin.subject}; {measured[0].load.concurrency} requests at a time"
    if any(row.limit is not None for row in measured):
        subtitle += "; in brackets: of the device's limit"
    chosen = looks(names.servers)
    # One scale for all panels: they are there to be compared.
    longest = max(row.tokens_per_second for row in measured)
    height = 1.75 + 0.36 * len(names.servers)
    with drawing(title, subtitle, panels=len(mixes), height=height, left=1.9) as made:
        for axes, mix in zip(made.panels, mixes, strict=True):
            rows = [row for row in measured if row.load.mix == mix]
            draw(axes, Bars(rows[0].load.title, "tokens/s", _rate, _text), names, rows, chosen, longest)
    return made.svg


def _rate(row: Measurement) -> float:
    return row.tokens_per_second


def _text(row: Measurement) -> str:
    limit = "" if row.limit is None else f" ({percent(row.limit.fraction)})"
    return figure(row.tokens_per_second) + limit
