"""Fill the tables of docs/benchmarks.md, docs/scale.md and the README from perf/results/*.json (`make report`).

A table stands between <!-- table: NAME --> and <!-- end: NAME -->; the rest of a page stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from perf.environment import ROOT
from perf.load.workload import SLOTS
from perf.lora_report import lora
from perf.results_file import RESULTS, Row, at, read
from perf.table import MODEL_COLUMN, Column, Table, beside, figure, markdown, percent, pivot, several

PAGES = (ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "scale.md", ROOT / "README.md")


def _p50_p95(percentiles: Row) -> str:
    return several(percentiles["p50"], percentiles["p95"])


def _latency(percentiles: Row) -> str:
    # Of so few requests the 99th percentile would be the maximum.
    return several(*(percentiles[name] / 1e3 for name in ("p50", "p95", "max")))


def _lengths(row: Row) -> str:
    mix, mean = row["load"]["mix"], row["load"]["mean_output_tokens"]
    return f"new tokens: {'all' if mix == 'equal' else f'{mix}, mean about'} {mean:.0f}."


INTEGER = "{:,.0f}".format
SERVER = Column("server", "title", str)
USERS = Column("users", "load/concurrency", INTEGER)
MEMORY = (
    Column("weights", "weights", str),
    Column("MiB", "memory/weights_mib"),
    Column("memory of the processes, MiB", "memory/process_mib", INTEGER),
)
REQUESTS = Column("requests", "requests", INTEGER)
LATENCY = Column("latency p50 / p95 / max, s", "latency_ms", _latency)
TOKENS = Column("tokens/s", "tokens_per_second")
TTFT = Column("TTFT p50 / p95, ms", "time_to_first_token_ms", _p50_p95)
ITL = Column("ITL p50 / p95, ms", "inter_token_latency_ms", _p50_p95)
HITS = Column("hit rate", "hit_rate", percent)
LIMIT = (
    Column("limit, tokens/s", "limit/tokens_per_second"),
    Column("of the limit", "limit/fraction", percent),
    Column("set by", "limit/bound_by", str),
)


def article(rows: Sequence[Row]) -> list[Table]:
    """The article's setting, a row for each server."""
    # FP16 would compare number formats on a CPU.
    if naive := {row["server"]: row["tokens_per_second"] for row in rows}.get("naive_fp32"):
        rows = [{**row, "over_naive": row["tokens_per_second"] / naive} for row in rows]
    columns = [
        *(SERVER, *MEMORY, REQUESTS, LATENCY),
        Column("requests/s", "requests_per_second"),
        TOKENS,
        Column("over naive FP32", "over_naive", lambda ratio: f"{figure(ratio)} ×"),
        Column("Triton's batch", "mean_batch"),
        Column("sequences per step", "mean_sequences"),
        *LIMIT,
    ]
    note = f"{rows[0]['load']['concurrency']} requests at a time; {_lengths(rows[0])}"
    return [Table(columns, rows, note)]


def speed(rows: Sequence[Row]) -> list[Table]:
    """Each server's throughput at each number of users beside its quality, the fastest at the most first; latencies."""
    counts = sorted({row["load"]["concurrency"] for row in rows})
    servers = pivot([{**row, "quality": distance(row)} for row in rows], ["server"], "load/concurrency")
    servers.sort(key=lambda server: -(at(server, f"{counts[-1]}/tokens_per_second") or 0.0))

    def each(what: str, path: str, shown: Callable[[Any], str], among: Sequence[int] = counts) -> list[Column]:
        return [Column(f"{what} at {count}", f"{count}/{path}", shown) for count in among]

    throughput = [
        *(SERVER, *MEMORY[1:3]),
        Column("KL divergence, nats", "quality/kl_nats/mean"),
        Column("best token differs", "quality/top1_agreement", lambda share: percent(1 - share)),
        *each("tokens/s", "tokens_per_second", figure),
        *each("of the limit", "limit/fraction", percent, [count for count in counts if count in (1, SLOTS)]),
    ]
    latency = [
        SERVER,
        *each("first token p50 / p95, ms,", "time_to_first_token_ms", _p50_p95),
        *each("between tokens p50, ms,", "inter_token_latency_ms/p50", figure),
    ]
    note = f"{rows[0]['model']}; at most {SLOTS} requests are decoded at a time; {_lengths(rows[0])}"
    return [Table(throughput, servers), Table(latency, servers, note)]


def headline(rows: Sequence[Row]) -> list[Table]:
    """The same throughput and quality alone, for the README."""
    throughput, _ = speed(rows)
    shown = [column for column in throughput.columns if "MiB" not in column.title and "limit" not in column.title]
    return [Table(shown, throughput.rows)]


def distance(row: Row) -> Row | None:
    """Return the quality measurement of a row's server, if there is one of its model."""
    path = RESULTS / "quality.json"
    result = read(path) if path.exists() else None
    if result is None or str(result.content["settings"]["model"]) not in row["model"]:
        return None
    found: Row | None = result.content["measurements"].get(row["server"])
    return found


def prefixes(rows: Sequence[Row]) -> list[Table]:
    """Chats, retrieval and prompts without a common prefix: our cache on and off, and vLLM's."""
    caches = {
        "triton_llama_int8_prefix_cache_on": "cache on",
        "triton_llama_int8_prefix_cache_off": "cache off",
        "vllm_int8_prefix_cache": "vLLM INT8",
        "vllm_prefix_cache": "vLLM floats",
    }
    columns = [MODEL_COLUMN, Column("load", "load/mix", str), USERS, *beside(caches, TTFT, TOKENS, HITS)]
    return [Table(columns, pivot(rows, ["model", "load/mix", "load/concurrency"], "server"))]


def drafts(rows: Sequence[Row]) -> list[Table]:
    """Each kind of answers at each number of users: every server with drafts beside itself without."""
    servers = {
        "INT8": ("triton_llama_int8_drafts_off", "triton_llama_int8_drafts_auto"),
        "GGUF Q4_1": ("triton_llama_q4_1_drafts_off", "triton_llama_q4_1_drafts_auto"),
        "llama.cpp": ("llama_cpp_q4_1_drafts_none", "llama_cpp_q4_1_drafts_ngram-mod"),
    }
    lines = pivot(rows, ["load/mix", "load/concurrency"], "server")
    columns = [Column("answers", "load/mix", str), USERS]
    for name, (without, drafting) in servers.items():
        for line in lines:
            before, after = (at(line, f"{server}/tokens_per_second") for server in (without, drafting))
            line[f"{name} ratio"] = after / before if before and after else None
        columns += [
            Column(f"{name}: tokens/s without", f"{without}/tokens_per_second"),
            Column(f"{name}: with drafts", f"{drafting}/tokens_per_second"),
            Column(f"{name}: ratio", f"{name} ratio", lambda ratio: f"{figure(ratio)} ×"),
            Column(f"{name}: drafted tokens", f"{drafting}/drafted_share", percent),
        ]
    return [Table(columns, lines, "Drafted tokens: those output tokens that were accepted from drafts.")]


def quality(rows: Sequence[Row]) -> list[Table]:
    """The unquantized weights and what is served, by its distance from them."""
    columns = [
        Column("weights", "title", str),
        Column("MiB", "weights_mib"),
        Column("perplexity", "perplexity", "{:.3f}".format),
        Column("loss over the first row's, nats", "loss_difference", "{0[mean]:+.5f} ± {0[standard_error]:.5f}".format),
        Column("KL divergence mean / p99, nats", "kl_nats", lambda nats: several(nats["mean"], nats["p99"])),
        Column("products, one term = 1", "products", "{:.2f}".format),
        Column("same best token", "top1_agreement", percent),
    ]
    return [Table(columns, sorted(rows, key=lambda row: at(row, "kl_nats/mean") or 0.0))]


def capacity(rows: Sequence[Row]) -> list[Table]:
    """How many replicas each kind of users takes, and the queue's predictions beside what two replicas measured."""
    kinds = [
        Column("users", "kind", str),
        *(Column(f"{name}, tokens", name, INTEGER) for name in ("prompt", "output")),
        Column("a request every, s", "period", INTEGER),
        *(Column(f"{name.upper()} p95 at most, s", name) for name in ("ttft", "itl")),
        Column("requests/s of a replica", "rate"),
        *(Column(f"replicas for {users:,}", f"replicas/{users}", INTEGER) for users in (10, 1_000, 100_000)),
    ]
    both = {"predicted": "predicted", "measured": "measured"}
    checks = [Column("of the most requests/s", "share", percent), REQUESTS, *beside(both, TOKENS, TTFT, ITL)]
    return [
        Table(kinds, [row for row in rows if "kind" in row]),
        Table(checks, [row for row in rows if "share" in row]),
    ]


TABLES = {
    "headline": ("bench-smollm2", headline),
    "smollm2": ("bench-smollm2", speed),
    "1b": ("bench-1b", speed),
    "7b": ("bench-7b", speed),
    "article": ("bench-article", article),
    "prefixes": ("bench-prefixes", prefixes),
    "formats": ("bench-formats", speed),
    "drafts": ("bench-drafts", drafts),
    "lora": ("bench-lora", lora),
    "capacity": ("capacity", capacity),
    "quality": ("quality", quality),
    "quality-formats": ("quality-formats", quality),
}
"""For each table's name in a page: its results file, and what makes it."""


def filled(page: str) -> str:
    """Return a page with the content of its tables. Raises KeyError for one of an unknown name."""

    def table(found: re.Match[str]) -> str:
        file, make = TABLES[found[1]]
        path = RESULTS / f"{file}.json"
        content = markdown(read(path), make, notes=make is not headline) if path.exists() else "Not measured yet."
        return f"<!-- table: {found[1]} -->\n\n{content}\n\n<!-- end: {found[1]} -->"

    return re.sub(r"<!-- table: (\S+) -->.*?<!-- end: \1 -->", table, page, flags=re.DOTALL)


if __name__ == "__main__":
    for file in PAGES:
        file.write_text(filled(file.read_text()))
