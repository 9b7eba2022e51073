"""Our server beside what people would use instead: the same model, machine, requests and load generator, in one run."""

from __future__ import annotations

from perf.report.cells import figure, percent, several
from perf.report.measurement import Measurement
from perf.report.run import Run
from perf.report.table import Column, Table, table
from perf.report.tables import columns

_FIRST = Column[Measurement](
    "first token p50 / p95, ms", lambda row: None if row.first_token is None else several(*row.first_token.milliseconds)
)
_BETWEEN = Column[Measurement](
    "between tokens p50 / p95, ms",
    lambda row: None if row.inter_token is None else several(*row.inter_token.milliseconds),
)
_GOOD = Column[Measurement](
    "goodput, requests/s",
    lambda row: None if row.goodput is None else figure(row.goodput.requests_per_second),
)
_GOOD_SHARE = Column[Measurement](
    "within the objective", lambda row: None if row.goodput is None else percent(row.goodput.share)
)
_RATE = Column[Measurement](
    "sent, requests/s",
    lambda row: None if row.load.rate_per_second is None else figure(row.load.rate_per_second),
)


def closed(run: Run) -> Table | None:
    """Return the table of the closed loop: so many users, each sending its next request when it has its answer."""
    measured = run.measured("peers", "closed")
    if not measured:
        return None
    at_a_time = sorted({row.load.concurrency for row in measured if row.load.concurrency is not None})
    return table(
        [
            columns.LENGTHS,
            columns.SERVER,
            columns.weights(measured),
            columns.memory(measured),
            columns.REQUESTS,
            columns.latency(measured),
            _FIRST,
            _BETWEEN,
            columns.REQUESTS_RATE,
            columns.TOKENS,
            columns.LIMIT,
            columns.OF_LIMIT,
        ],
        measured,
        [
            f"Load: {', '.join(map(str, at_a_time))} users, each sends its next request when it has its answer; "
            "greedy; warm-up not counted.",
            f"{columns.WINDOW} Tokens count when they come: those of an answer in one piece with the answer.",
            *columns.bound_by(measured),
            *columns.stolen(measured),
            *columns.not_run(run.not_run("peers", "closed")),
            run.origin.line(),
        ],
    )


def poisson(run: Run) -> Table | None:
    """Return the table of the open loop: requests come when they come, whether or not the ones before are answered."""
    measured = run.measured("peers", "poisson")
    if not measured:
        return None
    return table(
        [
            columns.LENGTHS,
            _RATE,
            columns.SERVER,
            columns.REQUESTS,
            _FIRST,
            _BETWEEN,
            columns.latency(measured),
            columns.TOKENS,
            _GOOD,
            _GOOD_SHARE,
        ],
        measured,
        [
            "Load: Poisson arrivals; greedy; warm-up not counted. Latencies count from when a request was due. Rates "
            "are over the whole run, from the first request due to the last answer, the emptying included.",
            *_objectives(measured),
            *columns.stolen(measured),
            *columns.not_run(run.not_run("peers", "poisson")),
            run.origin.line(),
        ],
    )


def _objectives(measured: list[Measurement]) -> list[str]:
    """Return a line for each objective that goodput was counted under."""
    found = {(row.goodput.first_token_s, row.goodput.inter_token_s) for row in measured if row.goodput is not None}
    return [
        f"Objective: the first token within {figure(first)} s and {figure(1e3 * inter)} ms between tokens in the mean; "
        f"an answer in one piece within {figure(first)} s and {figure(1e3 * inter)} ms for each token more."
        for first, inter in sorted(found)
    ]
