"""A run of a load as an entry of a result's measurements.

The article's runs are perf_analyzer's. Their throughput is over the steady-state window (`load.records`), too, but from
the growth of the server's own token counter in it. Triton's batch is over as many of the last answers as are measured:
it counts when it answers, and where the queue is long most of what it answers in the window is the warm-up.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil
from transformers import LlamaConfig

from perf.bench.counters import Samples
from perf.bench.prefixes import PrefixLoad
from perf.environment import memory_of
from perf.load.protocols import Request
from perf.load.records import Run
from perf.load.summary import summarize, summarize_prefixes
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates
from perf.servers.running import Running, Server
from perf.workload import PROMPT_TOKENS, Mix


def entry(
    server: Server,
    running: Running,
    checkpoint: Path,
    mix: Mix,
    run: Run,
    requests: Sequence[Request],
    rates: DeviceRates,
    more: Mapping[str, object],
) -> dict[str, object]:
    """Return the measurement of a closed loop of these requests. more: replaces the generator's figures.

    The limit is the device's for this load in these weights, for any server: all concurrent requests may share a step.
    """
    lengths = [request.output_tokens for request in requests[run.warmup :]]
    prompts = [record.prompt_tokens for record in run.measured if record.prompt_tokens is not None]
    prompt = round(statistics.mean(prompts)) if prompts else PROMPT_TOKENS
    load: dict[str, object] = {"mix": mix, **_load(run, lengths), "prompt_tokens": prompt}
    measurement = {**_served(server, running, load, run), **more}
    rate = measurement.get("tokens_per_second")
    if isinstance(rate, float) and server.stored is None:
        config, rows = LlamaConfig.from_pretrained(checkpoint), run.concurrency
        bound = roofline(config, server.weights, rates, rows, lengths, PROMPT_TOKENS, True, server.floats)
        measurement["limit"] = bound.beside(rate)
    return measurement


def prefix_entry(server: Server, running: Running, load: PrefixLoad, run: Run) -> dict[str, object]:
    """Return the measurement of a load with prefixes: without a limit, as that of a cached prompt is another one."""
    lengths = [record.output_tokens for record in run.measured if not record.error]
    facts: dict[str, object] = {"kind": load.kind, "round": load.round, **_load(run, lengths or [0])}
    measurement = {**_served(server, running, facts, run), **summarize_prefixes(run)}
    if load.kind == "context" and not (long := run.records[0]).error and long.first_token is not None:
        measurement["long_sequence"] = {
            "tokens": (long.prompt_tokens or 0) + long.output_tokens,
            "time_to_first_token_ms": round(1e3 * (long.first_token - long.scheduled), 3),
            "latency_ms": round(1e3 * long.latency, 3),
        }
    return measurement


def _load(run: Run, lengths: Sequence[int]) -> dict[str, object]:
    return {
        "concurrency": run.concurrency,
        "requests": len(run.measured),
        "warmup_requests": run.warmup,
        "mean_output_tokens": round(statistics.fmean(lengths), 2),
    }


def _served(server: Server, running: Running, load: Mapping[str, object], run: Run) -> dict[str, object]:
    head = {**server.to_json(), "settings": dict(running.settings), "command": running.command, "load": load}
    return {**head, **summarize(run), **_memory(running)}


def counted(counters: Samples, run: Run, requests: Sequence[Request]) -> dict[str, object]:
    """Return the figures from the server's counters."""
    window = run.steady
    assert window is not None, "the warm-up is as large as the concurrency"
    # When as many answers had arrived as the warm-up has requests.
    warm, last = sorted(record.ended for record in run.records)[run.warmup - 1], counters.readings[-1][0]

    def stepped(name: str) -> float:
        return counters.growth(name, window.begin, window.end)

    def answered(name: str) -> float:
        return counters.growth(name, warm, last)

    def ratio(amount: float, count: float) -> float | None:
        return round(amount / count, 3) if count else None

    tokens = stepped("llama_generated_tokens_total")
    rate = tokens / window.seconds
    mean_length = statistics.mean(request.output_tokens for request in requests)
    return {
        "output_tokens": round(tokens),
        "requests_per_second": round(rate / mean_length, 4),
        "tokens_per_second": round(rate, 2),
        "mean_rows": ratio(stepped("llama_step_rows_sum"), stepped("llama_step_rows_count")),
        "mean_batch": ratio(answered("nv_inference_count"), answered("nv_inference_exec_count")),
    }


def _memory(running: Running) -> dict[str, object]:
    try:
        kind, mib = memory_of(running.pid)
    except psutil.NoSuchProcess:
        # The requests that it did not answer are errors in the measurement.
        return {}
    return {"memory": {"kind": kind, "weights_mib": round(running.weights_mib, 1), "process_mib": round(mib, 1)}}
