"""The settings that nothing beats, and the recommended ones."""

from __future__ import annotations

from perf.report.cells import figure, several
from perf.report.points import TunePoint, bound, load, points
from perf.report.run import Run
from perf.report.table import Column, Table, table


def tune(run: Run) -> Table | None:
    """Return a row for each point of the Pareto front, and one for the recommended point; None if there are none."""
    found = points(run)
    shown = [point for point in found if point.pareto or point.recommended]
    if not shown:
        return None
    return table(
        [
            *(_setting(name) for name in shown[0].settings),
            Column("latency p50 / p95, s", lambda point: several(point.p50, point.p95)),
            Column("tokens/s", lambda point: figure(point.tokens_per_second)),
            Column("", lambda point: "recommended" if point.recommended else "", right=False),
        ],
        shown,
        [
            f"Load: {load(run).arrivals}; new tokens: {load(run).title}. {len(found)} points were measured; of these "
            f"no other one has as much throughput at as low a p95. {_verdict(run, shown)}",
            run.origin.line(),
        ],
    )


def _setting(name: str) -> Column[TunePoint]:
    return Column(name, lambda point: point.settings.get(name))


def _verdict(run: Run, shown: list[TunePoint]) -> str:
    asked = f"a p95 of at most {figure(bound(run))} s"
    if any(point.recommended for point in shown):
        return (
            f"Recommended for {asked}: what is better by more than two measurements of one point differ, if anything."
        )
    return f"None of them has {asked}."
