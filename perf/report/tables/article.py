"""The article's table, as it was measured here, and the one at mixed lengths; both by perf_analyzer."""

from __future__ import annotations

from perf.report.cells import figure, percent
from perf.report.measurement import Measurement
from perf.report.run import Run
from perf.report.table import Column, Table, table
from perf.report.tables import columns, rates

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
            columns.REQUESTS,
            columns.latency(measured),
            columns.REQUESTS_RATE,
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
            columns.WINDOW,
            *columns.bound_by(measured),
            *rates.lines(run, measured),
            *columns.stolen(measured),
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
            columns.REQUESTS,
            columns.latency(rows),
            columns.REQUESTS_RATE,
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
            columns.WINDOW,
            *columns.bound_by(rows),
            *rates.lines(run, rows),
            *columns.stolen(rows),
            *columns.not_run([reason for mix in MIXED for reason in run.not_run("article", mix)]),
            run.origin.line(),
        ],
    )


def sweep(run: Run) -> Table | None:
    """Return tokens/s, p95 and share of the limit at every concurrency, a row each; None if there was no sweep."""
    measured = run.measured("sweep")
    if not measured:
        return None
    found = {(row.title, row.load.concurrency): row for row in measured}
    fewest, most = (count(row.requests for row in measured) for count in (min, max))
    counted = str(most) if fewest == most else f"{fewest} to {most}"
    steps = sorted({row.load.concurrency for row in measured if row.load.concurrency is not None})
    titles = list(dict.fromkeys(row.title for row in measured))
    what = "tokens/s / p95 s" + (" / of the limit" if any(row.limit is not None for row in measured) else "")

    def column(title: str) -> Column[int]:
        def cell(concurrency: int) -> str | None:
            row = found.get((title, concurrency))
            return None if row is None else " / ".join(_cells(row))

        return Column(f"{title}, {what}", cell)

    return table(
        [Column("concurrency", str), *(column(title) for title in titles)],
        steps,
        [
            _load(measured[0], concurrency=False),
            f"{counted} requests were measured for each figure. {columns.WINDOW}",
            *columns.bound_by(measured),
            *columns.stolen(measured),
            *columns.not_run(run.not_run("sweep")),
            run.origin.line(),
        ],
    )


def _cells(row: Measurement) -> list[str]:
    limit = [] if row.limit is None else [percent(row.limit.fraction)]
    return [figure(row.tokens_per_second), figure(row.latency.p95), *limit]


def _load(row: Measurement, *, lengths: bool = True, concurrency: bool = True) -> str:
    """Return what was sent, in words."""
    parts = [f"{row.load.concurrency} requests at a time" if concurrency else "so many requests at a time"]
    if lengths:
        parts.append(f"new tokens: {row.load.title}")
    return f"Load: {'; '.join(parts)}; greedy; warm-up not counted."
