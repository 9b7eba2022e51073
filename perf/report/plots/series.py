"""A sweep's measurements as one line a server."""

from __future__ import annotations

from dataclasses import dataclass

from perf.report.measurement import Load, Measurement
from perf.report.plots.palette import Look, looks
from perf.report.run import Run


@dataclass(frozen=True)
class Point:
    """A measurement at one concurrency."""

    concurrency: int
    measurement: Measurement


@dataclass(frozen=True)
class Series:
    """One server's points by rising concurrency."""

    title: str
    look: Look
    points: list[Point]

    @property
    def load(self) -> Load:
        """What was sent at the first point; along a series only the concurrency changes."""
        return self.points[0].measurement.load


def sweep(run: Run) -> list[Series]:
    """Return a series for every server of the sweep; none if there was no sweep."""
    servers: dict[str, list[Measurement]] = {}
    for row in run.measured("sweep"):
        servers.setdefault(row.server, []).append(row)
    chosen = looks(list(servers))
    return [Series(rows[0].label, chosen[server], _points(rows)) for server, rows in servers.items()]


def _points(rows: list[Measurement]) -> list[Point]:
    points = [Point(row.load.concurrency, row) for row in rows if row.load.concurrency is not None]
    return sorted(points, key=lambda point: point.concurrency)
