"""A configuration under the article's load, by perf_analyzer: one entry of a result's measurements.

Throughput is over the steady-state window (`load.records`): the growth of the server's own token counter in it, over
its seconds. Requests per second are tokens per second over the load's mean length, because the answers in the window
are no measure of the work done in it. `whole_run` has the plain figures beside it: everything that was sent, warm-up
included, from the first request to the last answer.

Latencies are of every request after the warm-up, those answered after the window too: leaving them out would leave out
the longest. Queue time and batch are over as many of the last answers; Triton counts both when it answers, and where
the queue is long most of what it answers in the window is the warm-up.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from perf import workload
from perf.analyzer import run
from perf.analyzer.binary import PerfAnalyzer
from perf.analyzer.run import AnalyzerReport
from perf.article.configurations import Served
from perf.article.counters import Sampling
from perf.article.sizes import Pace, Size
from perf.environment import memory_of
from perf.load.arrivals import Closed
from perf.load.summary import describe, percentiles
from perf.roofline.physics import best
from perf.roofline.rates import DeviceRates

Measurement = dict[str, object]
TIMEOUT_S = 3600.0
"""Default for a run of perf_analyzer."""
_SHORT, _LONG = 4, 20
"""Mean lengths, in tokens, of the two waves that the pace is measured with."""
_FEWEST_FOR_PACE = 4
_SLACK_S = 120.0
_SLOWER_THAN_PREDICTED = 4.0


@dataclass(frozen=True)
class Load:
    """`concurrency` users. requests: measured, after `warmup` others, at least `concurrency`. mean: tokens."""

    mix: workload.Mix
    concurrency: int
    requests: int
    warmup: int
    mean: int = workload.MEAN_OUTPUT


def sized(
    served: Served,
    mix: workload.Mix,
    concurrency: int,
    size: Size,
    rates: DeviceRates | None,
    analyzer: PerfAnalyzer,
    mean: int = workload.MEAN_OUTPUT,
) -> Measurement:
    """Apply a load of this size to a running server; `size` in the result explains the choice."""
    load = Load(mix, concurrency, size.requests, size.warmup, mean)
    # A server that hangs must not use up the whole run's time.
    timeout = _SLACK_S + _SLOWER_THAN_PREDICTED * size.predicted_s
    return {**under(served, load, rates, analyzer, timeout), "size": size.to_json()}


def pace(served: Served, mix: workload.Mix, concurrency: int, analyzer: PerfAnalyzer) -> Pace:
    """Measure the server's pace with two waves of short requests of the same mix, which also warm it up."""
    # The longer one first: one-time work of a fresh server makes the prediction longer, not shorter.
    long = _wave_seconds(served, mix, concurrency, _LONG, analyzer)
    return Pace(concurrency, _SHORT, _wave_seconds(served, mix, concurrency, _SHORT, analyzer), _LONG, long)


def under(
    served: Served, load: Load, rates: DeviceRates | None, analyzer: PerfAnalyzer, timeout: float = TIMEOUT_S
) -> Measurement:
    """Apply a load to a running server once. Raises an AnalyzerError for a run that is no measurement."""
    requests = workload.warm_and_measured(served.checkpoint, load.mix, load.warmup, load.requests, load.mean)
    with Sampling(served.server.metrics_url) as counters:
        report = run.measure(
            served.server.grpc_url, requests, load.concurrency, load.warmup, timeout, analyzer=analyzer
        )
    lengths = [request.output_tokens for request in requests]
    window = report.window
    tokens = counters.growth("llama_generated_tokens_total", window.begin, window.end)
    rate = tokens / window.seconds
    taken = memory_of(served.server.pid)
    measurement: Measurement = {
        **served.configuration.to_json(),
        "generator": "perf_analyzer",
        "settings": served.settings(),
        "command": report.command,
        "perf_analyzer": {"version": report.version, "server_us": dict(report.server_us)},
        "load": describe(
            load.mix,
            Closed(load.concurrency),
            load.requests,
            load.warmup,
            round(sum(one.prompt_tokens for one in report.answered) / len(requests)),
            round(sum(one.output_tokens for one in report.measured) / len(report.measured), 2),
        ),
        "requests": len(report.measured),
        # perf_analyzer stops at the first one.
        "errors": 0,
        "duration_s": round(window.seconds, 4),
        "output_tokens": round(tokens),
        "requests_per_second": round(rate / (sum(lengths) / len(lengths)), 4),
        "tokens_per_second": round(rate, 2),
        "whole_run": _whole(report, lengths),
        "latency_ms": percentiles(report.latencies_s),
        "latencies_s": [round(latency, 4) for latency in report.latencies_s],
        "memory": {
            "kind": taken.kind,
            "weights_mib": round(served.runs.loaded.weights_mib, 1),
            "process_mib": round(taken.mib, 1),
        },
        **_batching(counters, report),
    }
    if rates is not None:
        config = LlamaConfig.from_pretrained(served.checkpoint)
        # All concurrent requests may share a step: the device's bound for this load, not the config's.
        bound = best(
            config, served.configuration.weights, rates, load.concurrency, lengths, workload.PROMPT_TOKENS, steady=True
        )
        measurement["limit"] = bound.beside(rate)
    return measurement


def _whole(report: AnalyzerReport, lengths: list[int]) -> Measurement:
    seconds = report.whole.seconds
    return {
        "requests": len(lengths),
        "duration_s": round(seconds, 4),
        "output_tokens": sum(lengths),
        "requests_per_second": round(len(lengths) / seconds, 4),
        "tokens_per_second": round(sum(lengths) / seconds, 2),
    }


def _batching(counters: Sampling, report: AnalyzerReport) -> Measurement:
    def stepped(name: str) -> float:
        return counters.growth(name, report.window.begin, report.window.end)

    def answered(name: str) -> float:
        return counters.growth(name, report.warm, counters.last)

    return {
        "mean_rows": _ratio(stepped("llama_step_rows_sum"), stepped("llama_step_rows_count")),
        "mean_batch": _ratio(answered("nv_inference_count"), answered("nv_inference_exec_count")),
        "queue_ms": _ratio(answered("nv_inference_queue_duration_us") / 1e3, answered("nv_inference_count")),
    }


def _wave_seconds(served: Served, mix: workload.Mix, concurrency: int, mean: int, analyzer: PerfAnalyzer) -> float:
    count = max(concurrency, _FEWEST_FOR_PACE)
    requests = workload.requests(served.checkpoint, mix, count, mean)
    report: AnalyzerReport = run.measure(served.server.grpc_url, requests, concurrency, 0, TIMEOUT_S, analyzer=analyzer)
    return report.whole.seconds * concurrency / count


def _ratio(amount: float, count: float) -> float | None:
    """Return the ratio; None where nothing was counted in the window."""
    return round(amount / count, 3) if count else None
