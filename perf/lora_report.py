"""What LoRA adapters cost: the time of a token with them over the time without, in pairs that were measured in turn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Literal

from perf.results_file import Row
from perf.table import MODEL_COLUMN, Column, Table

AdapterMix = Literal["none", "one", "eight"]
MIX_TITLES: Mapping[AdapterMix, str] = {"none": "8 loaded, unused", "one": "one adapter", "eight": "8 adapters"}
"""What is measured with adapters, by the mix of its load."""
SERVERS = {"ours": "triton_llama_int8", "vLLM floats": "vllm"}
"""The servers without adapters. Those with adapters are named after them."""


def cost(without: Sequence[float], times: Sequence[float]) -> dict[str, float]:
    """Return the mean of the pairs' relative differences and, of several pairs, its standard error."""
    differences = [after / before - 1 for before, after in zip(without, times, strict=True)]
    result = {"mean": statistics.fmean(differences)}
    if len(differences) > 1:
        result["standard_error"] = statistics.stdev(differences) / math.sqrt(len(differences))
    return {name: round(value, 5) for name, value in result.items()}


def lora(rows: Sequence[Row]) -> list[Table]:
    """Each model and number of users or sequences: tokens/s or a step's time without adapters, and what they cost."""
    costs = [Column(title, f"costs/{mix}", _percents) for mix, title in MIX_TITLES.items()]
    steps = [row for row in rows if "step_ms" in row]
    served = [row for row in rows if "step_ms" not in row]
    places = dict.fromkeys((row["model"], row["load"]["concurrency"]) for row in served)
    lines = [{"model": place[0], "users": place[1], **_costs(served, *place)} for place in places]
    throughput = [MODEL_COLUMN, Column("users", "users", "{:,.0f}".format)]
    for name in SERVERS:
        throughput.append(Column(f"{name}: tokens/s without", f"{name}/tokens_per_second"))
        throughput += [Column(f"{name}: {column.title}", f"{name}/{column.path}", column.shown) for column in costs]
    latency = [
        MODEL_COLUMN,
        Column("sequences", "load/concurrency", "{:,.0f}".format),
        Column("step without, ms", "step_ms"),
    ]
    note = "± is one standard error: over rounds in the first table, over turns of a few steps in the second."
    tables = [Table(throughput, lines, note), Table([*latency, *costs], steps)]
    return [table for table in tables if table.rows]


def _costs(rows: Sequence[Row], model: str, users: int) -> dict[str, object]:
    """Return each server's tokens/s without adapters, and the costs of its mixes."""
    rates = {
        (row["server"], row["load"]["mix"], row["load"]["round"]): row["tokens_per_second"]
        for row in rows
        if (row["model"], row["load"]["concurrency"]) == (model, users) and "tokens_per_second" in row
    }
    result: dict[str, object] = {}
    for name, server in SERVERS.items():
        without = {number: rate for (key, _, number), rate in rates.items() if key == server}
        costs: dict[str, object] = {}
        for mix in MIX_TITLES:
            loaded = {number: rates.get((f"{server}_adapters", mix, number)) for number in without}
            pairs = [(1 / without[number], 1 / rate) for number, rate in loaded.items() if rate]
            if pairs:
                costs[mix] = cost(*zip(*pairs, strict=True))
        if without:
            result[name] = {"tokens_per_second": statistics.fmean(without.values()), "costs": costs}
    return result


def _percents(cost: Row) -> str:
    error = f" ± {100 * cost['standard_error']:.1f}" if "standard_error" in cost else ""
    return f"{100 * cost['mean']:+.1f}{error} %"
