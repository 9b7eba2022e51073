"""The table of stops in docs/operations.md: what became of every request that a server had accepted."""

from __future__ import annotations

from collections import Counter

from perf.report.results import Result, Row
from perf.report.text import Column, Table, table

STOPS = {
    "sigterm": "SIGTERM to the launcher",
    "group": "SIGTERM to its process group, below make",
    "sigint": "SIGINT (Ctrl-C)",
    "parent": "SIGKILL of the launcher",
    "prestop": "preStop, then SIGTERM",
    "docker": "`docker stop`",
    "unload": "unload through the API",
    "reload": "reload through the API",
}
"""By the key of a result's cell: the column's title."""

SITUATIONS = {
    "idle": "idle, after 1 request",
    "running": "32 running",
    "queued": "32 running, 32 to 64 queued",
    "prefill": "128 long prompts in prefill",
    "read": "32 streams that are read and stay open",
    "unread": "8 streams that are not read",
    "half-closed": "20 streams, half-closed",
    "leaked": "8 running, a stream leaked",
    "keep-alive": "8 running, 8 idle connections",
    "half-body": "8 running, 4 bodies half sent",
    "cancelling": "32 running, 16 cancel at the stop",
    "everything": "all of these at once",
}
"""By the key of a result's cell: the row's title."""

_NOTES = {
    "refused": "Refused: an error that names the reason, such as `the server is stopping`.",
    "cut off": (
        "Cut off: the connection closed within a stream, which the client's protocol reports. It happens to streams "
        "that are not read until the server is gone, and to half-closed HTTP streams: to Triton such a client has "
        "left, with or without a stop."
    ),
    "cancelled": "Cancelled: by the client, when the stop began.",
    "silent": (
        "Silent: HTTP streams that were not read for 5 s while a container ended. Its network ends with it, and "
        "so does what its kernel still held: such a client needs a timeout."
    ),
    "lost": "**Lost**: no response, or another text than without the stop.",
}
_HELD = (
    "Held: Triton 2.51 has refused new requests and answered all others, but keeps the model (`UNLOADING`) for as long "
    "as a gRPC stream that has asked it stays open, or leaked. The supervisor's stops don't wait for that."
)


def stops(config: str, result: Result) -> Table:
    """Return the table of a config: a row for each situation, a column for each stop."""
    cells = result.measured(f"{config}/")
    by_key = {(cell["situation"], cell["stop"]): cell for cell in cells}
    rows = [name for name in SITUATIONS if any(cell["situation"] == name for cell in cells)]

    def column(stop: str) -> Column:
        return Column(STOPS[stop], lambda row: _cell(by_key.get((row, stop))), right=False)

    outcomes = sum((Counter(cell["outcomes"]) for cell in cells), Counter[str]())
    failed = [
        f"Failed: {STOPS[cell['stop']]}, {SITUATIONS[cell['situation']]}: {cell['failures'][0]}"
        for cell in cells
        if cell["failures"]
    ]
    counted = ", ".join(f"{outcomes[outcome]:,} {outcome}" for outcome in ("complete", *_NOTES))
    return table(
        [Column("", SITUATIONS.__getitem__, right=False), *(column(stop) for stop in STOPS)],
        rows,
        [
            "Each cell is a server of its own: the requests that it had accepted and their outcome; the exit code; "
            f"the seconds until it was over. {len(cells)} cells, {outcomes.total():,} requests: {counted}.",
            *(note for outcome, note in _NOTES.items() if outcomes[outcome]),
            *([_HELD] if any(cell["held"] for cell in cells) else []),
            *failed,
            *result.missing(f"{config}/"),
            result.origin(),
        ],
    )


def _cell(cell: Row | None) -> str:
    if cell is None:
        return "not run"
    others = [f"{count} {outcome}" for outcome, count in cell["outcomes"].items() if outcome != "complete"]
    requests = ", ".join([f"{cell['outcomes'].get('complete', 0)} of {cell['accepted']}", *others])
    code = [] if cell["code"] is None else [f"code {cell['code']}"]
    over = "held" if cell["held"] else f"{cell['seconds']:.1f} s"
    text = "; ".join([requests, *code, over])
    return f"**failed**: {text}" if cell["failures"] else text
