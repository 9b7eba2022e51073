"""The table of what receipts cost and how fast they are verified; perf/receipts.py measures."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from perf.report.results import Result, Row
from perf.report.text import Column, figure, percent, table


def receipts(result: Result) -> str:
    """A line for each checkpoint and number of users."""
    rows = result.measured("")
    columns = [
        Column("model", "model", right=False),
        Column("users", lambda row: str(row["users"])),
        Column("tokens/s generated", _median("without")),
        Column("with receipts", _median("with")),
        Column("tokens/s verified", _median("verified")),
        Column("over generated", _ratio("verified", "with"), shown=lambda ratio: f"{figure(ratio)} ×"),
    ]
    steps = dict.fromkeys(row["settings"]["decode_steps"] for row in rows)
    settings = result.content["settings"]
    notes = [
        f"Prompts of 100 tokens, {settings['output_tokens']} new ones, temperature 1, over gRPC to one server under "
        f"`streaming` without a prefix cache; medians of {settings['rounds']} rounds, in which the loads alternate. "
        "Verified: tokens of the output, while as many verifications run as there are users.",
        f"Decode steps: {'; '.join(steps)}.",
        f"Steal time: at most {percent(max(row['stolen_share'] for row in rows))} of the processors' time.",
        result.origin(),
    ]
    return table(columns, rows, notes)


def _median(kind: str) -> Callable[[Row], float]:
    return lambda row: statistics.median(row["tokens_per_second"][kind])


def _ratio(kind: str, base: str) -> Callable[[Row], float]:
    return lambda row: _median(kind)(row) / _median(base)(row)
