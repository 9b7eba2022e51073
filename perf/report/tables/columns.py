"""The columns that tables of measurements share, and the lines beneath them."""

from __future__ import annotations

from collections.abc import Sequence

from perf.report.cells import figure, percent, several, whole
from perf.report.measurement import Measurement, NotRun
from perf.report.table import Column

LEAST_STOLEN = 0.005
"""A share of the processors' time that is worth mentioning."""
FEWEST_FOR_P99 = 100
"""Of fewer requests the 99th percentile is the longest one, and is called so."""
WINDOW = (
    "Throughput is that while the load was full: from the first request after the warm-up to the first answer after "
    "the last sending; requests/s is tokens/s over the mean length. Latencies are of all measured requests, those "
    "answered while the load emptied included."
)
"""What a closed loop's figures are of."""
BASES = ("naive_fp32", "naive_fp16")
"""What the others are compared with, the first that was measured. In FP16 alone a CPU would compare number formats."""


def server(measurement: Measurement) -> str:
    """Return the server's title, and its errors where there were any: figures beside errors are no full figures."""
    failed = measurement.errors
    return measurement.title + (f" ({failed} error{'s' if failed > 1 else ''})" if failed else "")


SERVER = Column[Measurement]("server", server, right=False)
LENGTHS = Column[Measurement]("new tokens", lambda row: row.load.title, right=False)
REQUESTS = Column[Measurement]("requests", lambda row: whole(row.requests))
REQUESTS_RATE = Column[Measurement]("requests/s", lambda row: figure(row.requests_per_second))
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
    """Return the column of the memory taken, which says whether that is the processes' own or the GPU's."""
    kinds = sorted({row.memory.kind for row in measurements if row.memory is not None})
    titles = {"PSS": "memory of the processes (PSS)", "VRAM": "VRAM in use on the device"}

    def cell(row: Measurement) -> str | None:
        if row.memory is None or row.memory.process_mib is None:
            return None
        return whole(row.memory.process_mib) + ("" if len(kinds) == 1 else f" {row.memory.kind}")

    return Column(f"{titles.get(kinds[0], kinds[0]) if len(kinds) == 1 else 'memory'}, MiB", cell)


def latency(measurements: Sequence[Measurement]) -> Column[Measurement]:
    """Return the column of latencies, with the longest one where too few were measured for a 99th percentile."""
    if min(row.requests - row.errors for row in measurements) < FEWEST_FOR_P99:
        return Column(
            "latency p50 / p95 / max, s", lambda row: several(row.latency.p50, row.latency.p95, row.latency.max)
        )
    return Column("latency p50 / p95 / p99, s", lambda row: several(row.latency.p50, row.latency.p95, row.latency.p99))


def speed_up(measurements: Sequence[Measurement]) -> Column[Measurement]:
    """Return the column of tokens/s over those of the naive server, at the same lengths; it applies where there is one.

    The server is the first of BASES that was measured at the most mixes of lengths.
    """
    found = {key: [row for row in measurements if row.server == key] for key in BASES}
    chosen = max(found.values(), key=len)
    base = {row.load.mix: row.tokens_per_second for row in chosen}

    def cell(row: Measurement) -> str | None:
        return f"{figure(row.tokens_per_second / base[row.load.mix])} ×" if row.load.mix in base else None

    return Column(f"over {chosen[0].title}" if chosen else "", cell)


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


def stolen(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line that says how much of the processors' time the host took, or none if it took next to none."""
    shares = [(row.stolen, row.title) for row in measurements if row.stolen is not None]
    if not any(share >= LEAST_STOLEN for share, _ in shares):
        return []
    most, title = max(shares)
    mean = sum(share for share, _ in shares) / len(shares)
    return [f"Meanwhile the host took {percent(mean)} of the processors' time; at most {percent(most)}, from {title}."]
