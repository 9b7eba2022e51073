"""What is around the computation, and where the time goes."""

from __future__ import annotations

from itertools import pairwise

from perf.overhead.parts import PartJSON, unit
from perf.report.cells import figure, percent
from perf.report.fields import Fields
from perf.report.parts import RUNS, account, load, parts
from perf.report.run import Run
from perf.report.table import Column, Table, table

LEAST_SHARE = 0.01
"""Of its whole; what is less is left out of the table."""

_WHOLES = (
    "Three wholes, which can't be compared with each other. Bare engine: the seconds of one run of all requests in one "
    "process without a server, under the stopwatch. Mean request: the mean seconds of one request at its client, "
    "in the server's last run. Cores: the core seconds of that run, all cores together.",
    "In the mean request, tokenization is the time that it takes in the bare engine's run; the rest is what no counter "
    "saw, and has the client, HTTP and JSON in it as well as Triton's IPC.",
)


def overhead(run: Run) -> Table | None:
    """Return tokens/s of the same load with less and less around the forward pass; None if it wasn't measured."""
    found = account(run)
    if found is None:
        return None
    runs = found.part("runs")
    speeds = {title: _speed(runs, name) for name, title in RUNS.items() if name in runs}
    titles = list(speeds)
    below = dict(pairwise(titles))
    last = titles[-1]

    def over_next(title: str) -> str | None:
        return percent(speeds[title] / speeds[below[title]]) if title in below else None

    return table(
        [
            Column("the same load", str, right=False),
            Column("tokens/s", lambda title: figure(speeds[title])),
            Column("of the next row's", over_next),
            Column("of the last row's", lambda title: None if title == last else percent(speeds[title] / speeds[last])),
        ],
        titles,
        [f"Load: {load(found)}.", run.origin.line()],
    )


def where(run: Run) -> Table | None:
    """Return the parts of each whole that take a share worth a row; None if they weren't measured."""
    found = account(run)
    if found is None:
        return None
    everything = parts(found)
    shown = [part for part in everything if part["share"] >= LEAST_SHARE]
    return table(
        [
            Column("where the time goes", _name, right=False),
            Column("time", lambda part: f"{figure(part['seconds'])} {unit(part)}"),
            Column("share of its whole", lambda part: percent(part["share"])),
            Column("µs a token", lambda part: figure(part["per_token_us"])),
        ],
        shown,
        [
            f"Load: {load(found)}. Not shown, at less than {100 * LEAST_SHARE:.0f} % each: "
            f"{len(everything) - len(shown)} of {len(everything)} parts.",
            *_WHOLES,
            run.origin.line(),
        ],
    )


def _speed(runs: Fields, name: str) -> float:
    return runs.part(name).number("tokens_per_second")


def _name(part: PartJSON) -> str:
    """Return the part's own name, indented below its parent's; no-break spaces, which Markdown keeps."""
    return "\u00a0" * 4 * part["name"].count("/") + part["name"].rsplit("/", 1)[-1]
