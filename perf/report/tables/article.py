"""The article's table, as it was measured here, and the one at mixed lengths; both by perf_analyzer."""

from __future__ import annotations

from limit.rates import DeviceRates

from report.cells import figure
from report.measurement import Measurement
from report.run import Run
from report.table import Column, Table, table
from report.tables import columns

MIXED = ("uniform", "geometric")


def article(run: Run) -> Table | None:
    """Return the table at equal lengths; None if nothing of it was measured."""
    measured = run.measured("article", "equal")
    if not measured:
        return None
    return table(
        [
            columns.SERVER,
            columns.weights(measured),
            columns.memory(measured),
            columns.LATENCY,
            columns.REQUESTS,
            columns.TOKENS,
            columns.speed_up(measured),
            columns.BATCH,
            columns.ROWS,
            columns.LIMIT,
            columns.OF_LIMIT,
        ],
        measured,
        [
            _load(measured[0]),
            *columns.bound_by(measured),
            *_rates(run),
            *columns.not_run(run.not_run("article", "equal")),
            run.origin.line(),
        ],
    )


def mixed(run: Run) -> Table | None:
    """Return the table at uniform and geometric lengths; None if nothing of it was measured."""
    rows = [row for mix in MIXED for row in run.measured("article", mix)]
    if not rows:
        return None
    return table(
        [
            columns.LENGTHS,
            columns.SERVER,
            columns.LATENCY,
            columns.REQUESTS,
            columns.TOKENS,
            columns.speed_up(rows),
            columns.BATCH,
            columns.ROWS,
            columns.LIMIT,
            columns.OF_LIMIT,
        ],
        rows,
        [
            _load(rows[0], lengths=False),
            *columns.not_run([reason for mix in MIXED for reason in run.not_run("article", mix)]),
            run.origin.line(),
        ],
    )


def sweep(run: Run) -> Table | None:
    """Return tokens/s and p95 at every concurrency, a row for each; None if there was no sweep."""
    measured = run.measured("sweep")
    if not measured:
        return None
    found = {(row.title, row.load.concurrency): row for row in measured}
    steps = sorted({row.load.concurrency for row in measured if row.load.concurrency is not None})
    titles = list(dict.fromkeys(row.title for row in measured))

    def column(title: str) -> Column[int]:
        def cell(concurrency: int) -> str | None:
            row = found.get((title, concurrency))
            return None if row is None else f"{_tokens(row)} / {_p95(row)}"

        return Column(f"{title}, tokens/s / p95 s", cell)

    return table(
        [Column("concurrency", str), *(column(title) for title in titles)],
        steps,
        [_load(measured[0], concurrency=False), *columns.not_run(run.not_run("sweep")), run.origin.line()],
    )


def _tokens(row: Measurement) -> str:
    return columns.TOKENS.cell(row) or ""


def _p95(row: Measurement) -> str:
    return figure(row.latency.p95)


def _load(row: Measurement, *, lengths: bool = True, concurrency: bool = True) -> str:
    """Return what was sent, in words."""
    parts = [f"{row.load.concurrency} requests at a time" if concurrency else "so many requests at a time"]
    if lengths:
        parts.append(f"new tokens: {row.load.title}")
    return f"Load: {'; '.join(parts)}; greedy; warm-up not counted."


def _rates(run: Run) -> list[str]:
    """Return the line of what the device's limit was computed from, or none where it wasn't measured."""
    found = run.fields.optional_part("rates")
    if found is None:
        return []
    bandwidth, operations = found.part("bandwidth"), found.part("operations")
    rates = DeviceRates.from_json(
        {
            "device": found.text("device"),
            "threads": found.count("threads"),
            "bandwidth": {size: bandwidth.number(size) for size in bandwidth.names()},
            "operations": {kind: operations.number(kind) for kind in operations.names()},
        }
    )
    return [f"Measured rates: {rates.describe()}."]
