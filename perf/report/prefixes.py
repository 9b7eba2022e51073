"""The tables of loads whose prompts share prefixes; perf/bench/prefixes.py has the loads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from perf.report.results import NotMeasuredError, Result, Row
from perf.report.tables import conditions
from perf.report.text import Column, at, percent, several, table

OFF = "triton_llama_int8_prefix_cache_off"
SERVERS = {
    "triton_llama_int8_prefix_cache_on": "cache on",
    OFF: "cache off",
    "vllm_int8_prefix_cache": "vLLM INT8",
    "vllm_prefix_cache": "vLLM",
}
"""Servers and their names in the heads of columns. vLLM's is completed by the weights that it has."""
MODELS = {"small": "prefixes/small/", "large": "prefixes/large/"}


class _Line(NamedTuple):
    """A load at a number of users. rounds: its measurements by server. ttft: the percentiles' path in them."""

    model: str
    load: str
    users: int
    ttft: str
    rounds: dict[str, list[Row]]
    rates: bool

    def median(self, server: str, path: str) -> float | None:
        """Return the median over the rounds of a server; None if nothing was measured there."""
        values = [value for row in self.rounds.get(server, []) if (value := at(row, path)) is not None]
        return statistics.median(values) if values else None


def prefixes(result: Result) -> str:
    """Chats, retrieval and prompts without a common prefix: our cache on and off, and vLLM's."""
    rows = result.measured(*MODELS.values())
    lines = [line for prefix in MODELS.values() for line in _lines(result, prefix)]
    names = {row["server"]: SERVERS[row["server"]] for row in rows}
    names |= {row["server"]: f"vLLM {row['weights']}" for row in rows if row["server"] == "vllm_prefix_cache"}
    # In the order of SERVERS.
    names = {server: names[server] for server in SERVERS if server in names}

    def ttft(server: str) -> Callable[[_Line], str | None]:
        def cell(line: _Line) -> str | None:
            p50, p95 = (line.median(server, f"{line.ttft}/{name}") for name in ("p50", "p95"))
            return None if p50 is None or p95 is None else several(p50, p95)

        return cell

    def rate(server: str, path: str) -> Callable[[_Line], float | None]:
        return lambda line: line.median(server, path) if line.rates else None

    columns = [
        Column("model", lambda line: line.model, right=False),
        Column("load", lambda line: line.load, right=False),
        Column("users", lambda line: str(line.users)),
        *(Column(f"TTFT p50 / p95, ms: {name}", ttft(server)) for server, name in names.items()),
        *(Column(f"tokens/s: {name}", rate(server, "tokens_per_second")) for server, name in names.items()),
        *(
            Column(f"hit rate: {name}", rate(server, "hit_rate"), shown=percent)
            for server, name in names.items()
            if server != OFF
        ),
    ]
    notes = [
        "Hit rate: cached tokens of prompts over all tokens of prompts, as the server counts them. TTFT from when the "
        "user sends. Closed loop; greedy; warm-up not counted. A chat's tokens/s and hit rate are of all its turns.",
        "Where a load has several rounds, with our cache on and off in turn, figures are the medians.",
        f"Models: {'; '.join(dict.fromkeys(row['model'] for row in rows))}.",
        *_errors(rows),
        *conditions(result, rows, *MODELS.values()),
    ]
    return table(columns, lines, notes)


def context(result: Result) -> str:
    """A sequence of half the KV cache beside short ones."""
    rows = result.measured("prefixes/context/")
    return table(
        [
            Column("server", "title", right=False),
            Column("users", "load/concurrency", shown=str),
            Column("requests", "requests", shown=str),
            Column("errors", "errors", shown=str),
            Column("tokens/s", "tokens_per_second"),
            Column("tokens of the long sequence", "long_sequence/tokens", shown="{:,}".format),
            Column("its first token, s", lambda row: _seconds(row, "long_sequence/time_to_first_token_ms")),
            Column("its latency, s", lambda row: _seconds(row, "long_sequence/latency_ms")),
            Column(
                "between tokens p50 / p95, ms",
                "inter_token_latency_ms",
                shown=lambda percentiles: several(percentiles["p50"], percentiles["p95"]),
            ),
        ],
        rows,
        [f"{rows[0]['model']}.", *conditions(result, rows, "prefixes/context/")],
    )


def _lines(result: Result, prefix: str) -> list[_Line]:
    try:
        rows = result.measured(prefix)
    except NotMeasuredError:
        return []
    by_load: dict[tuple[str, int], dict[str, list[Row]]] = {}
    for row in rows:
        load = row["load"]
        by_load.setdefault((load["kind"], load["concurrency"]), {}).setdefault(row["server"], []).append(row)
    lines: list[_Line] = []
    for (kind, users), rounds in by_load.items():
        model = rows[0]["model"].split(" parameters")[0].removeprefix("Llama of ")
        first = _Line(model, kind, users, "first_turn_ttft_ms", rounds, True)
        if kind == "chat":
            lines.append(first._replace(load="chat, turn 1", rates=False))
            first = first._replace(load="chat, turns 2 to 8", ttft="later_turns_ttft_ms")
        lines.append(first)
    return lines


def _errors(rows: Sequence[Row]) -> list[str]:
    failed = {f"{row['title']} ({row['errors']} of {row['load']['kind']})": None for row in rows if row["errors"]}
    return [f"Failed requests: {', '.join(failed)}."] if failed else []


def _seconds(row: Row, path: str) -> float | None:
    value = at(row, path)
    return None if value is None else value / 1e3
