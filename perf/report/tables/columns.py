"""The columns that tables of measurements share, and the lines beneath them."""

from __future__ import annotations

from collections.abc import Sequence

from report.cells import figure, percent, several, whole
from report.measurement import Measurement, NotRun
from report.table import Column


def server(measurement: Measurement) -> str:
    """Return the server's title, and its errors where there were any: figures beside errors are no full figures."""
    failed = measurement.errors
    return measurement.title + (f" ({failed} error{'s' if failed > 1 else ''})" if failed else "")


SERVER = Column[Measurement]("server", server, right=False)
LENGTHS = Column[Measurement]("new tokens", lambda row: row.load.title, right=False)
LATENCY = Column[Measurement]("latency p50 / p95 / p99, s", lambda row: several(*row.latency.seconds))
REQUESTS = Column[Measurement]("requests/s", lambda row: figure(row.requests_per_second))
TOKENS = Column[Measurement]("tokens/s", lambda row: figure(row.tokens_per_second))
ROWS = Column[Measurement]("rows a step", lambda row: None if row.mean_rows is None else figure(row.mean_rows))
BATCH = Column[Measurement]("Triton's batch", lambda row: None if row.mean_batch is None else figure(row.mean_batch))
LIMIT = Column[Measurement](
    "limit, tokens/s", lambda row: None if row.limit is None else figure(row.limit.tokens_per_second)
)
OF_LIMIT = Column[Measurement]("of the limit", lambda row: None if row.limit is None else percent(row.limit.fraction))


def weights(measurements: Sequence[Measurement]) -> Column[Measurement]:
    """Return the column of what the linear layers are stored in, with the MiB they take where that is known."""

    sizes = {row.server: row.memory.weights_mib for row in measurements if row.memory is not None}

    def cell(row: Measurement) -> str:
        size = sizes.get(row.server)
        return row.weights if size is None else f"{row.weights}, {figure(size)}"

    known = any(size is not None for size in sizes.values())
    return Column("weights, MiB" if known else "weights", cell, right=False)


def memory(measurements: Sequence[Measurement]) -> Column[Measurement]:
    """Return the column of the process's memory, which says whether that is the process's own or the GPU's."""
    kinds = sorted({row.memory.kind for row in measurements if row.memory is not None})

    def cell(row: Measurement) -> str | None:
        if row.memory is None or row.memory.process_mib is None:
            return None
        return whole(row.memory.process_mib) + ("" if len(kinds) == 1 else f" {row.memory.kind}")

    return Column(f"{kinds[0] if len(kinds) == 1 else 'memory'} of the process, MiB", cell)


def speed_up(measurements: Sequence[Measurement]) -> Column[Measurement]:
    """Return the column of tokens/s over those of the first server, at the same lengths."""
    first = measurements[0]
    base = {row.load.mix: row.tokens_per_second for row in measurements if row.server == first.server}

    def cell(row: Measurement) -> str | None:
        return f"{figure(row.tokens_per_second / base[row.load.mix])} ×" if row.load.mix in base else None

    return Column(f"over {first.title}", cell)


def not_run(found: Sequence[NotRun]) -> list[str]:
    """Return a line for the servers that couldn't be measured, or none."""
    return ["Not run: " + "; ".join(f"{one.title} ({one.reason})" for one in found) + "."] if found else []


def bound_by(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line that says what the limit is and what sets it, or none where there is no limit."""
    bounds: dict[str, list[str]] = {}
    for row in measurements:
        if row.limit is not None and row.title not in bounds.setdefault(row.limit.bound_by, []):
            bounds[row.limit.bound_by].append(row.title)
    if not bounds:
        return []
    by = "; ".join(f"{bound}: {', '.join(titles)}" for bound, titles in bounds.items())
    return [f"The limit is what this device's measured bandwidth and matrix rate allow for the same load. Set by {by}."]
