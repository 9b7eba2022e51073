"""A subject under the article's load, by perf_analyzer: one entry of a result's measurements.

Throughput is over the window of full load (`setting.window` says why): the tokens that the server's own counter gained
in it, over its seconds. Requests per second are tokens per second over the load's mean length, because the answers that
come in the window are no measure of what was done in it. `whole_run` has the plain figures beside it: everything that
was sent, warm-up included, from the first sending to the last answer.

Latencies are of every request after the warm-up, those answered after the window too: leaving them out would leave out
the longest. Queue time and batch are over as many of the last answers; Triton counts both when it answers, and what it
answers in the window is the warm-up's for the most part where the queue is long.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaConfig

from perf import workload
from perf.analyzer import run
from perf.analyzer.binary import PerfAnalyzer
from perf.analyzer.run import AnalyzerReport
from perf.article.samples import Sampling
from perf.article.serving import Served
from perf.article.sizes import Pace, Size
from perf.environment import memory_of
from perf.load.arrivals import Closed
from perf.load.summary import describe, percentiles
from perf.roofline import physics
from perf.roofline.rates import DeviceRates

Measurement = dict[str, object]
TIMEOUT_S = 3600.0
"""For a run of perf_analyzer, if nothing else is said."""
_SHORT, _LONG = 4, 20
"""Mean lengths, in tokens, of the two waves that the pace is taken from."""
_FEWEST_FOR_PACE = 4
_SLACK_S = 120.0
_SLOWER_THAN_PREDICTED = 4.0


@dataclass(frozen=True)
class Load:
    """So many requests at a time. requests: measured. warmup: sent before, at least `concurrency`. mean: tokens."""

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
    """Put a server that runs under a load of this size, and say under `size` how it was chosen."""
    load = Load(mix, concurrency, size.requests, size.warmup, mean)
    # A server that hangs must not take all of a run's time with it.
    timeout = _SLACK_S + _SLOWER_THAN_PREDICTED * size.predicted_s
    return {**under(served, load, rates, analyzer, timeout), "size": size.to_json()}


def pace(served: Served, mix: workload.Mix, concurrency: int, analyzer: PerfAnalyzer) -> Pace:
    """Return the server's pace, from two waves of short requests of the same mix; they also warm it up."""
    # The longer one first: what only a fresh server does then makes the prediction longer, not shorter.
    long = _wave_seconds(served, mix, concurrency, _LONG, analyzer)
    return Pace(concurrency, _SHORT, _wave_seconds(served, mix, concurrency, _SHORT, analyzer), _LONG, long)


def under(
    served: Served, load: Load, rates: DeviceRates | None, analyzer: PerfAnalyzer, timeout: float = TIMEOUT_S
) -> Measurement:
    """Put a server that runs under a load once. Raises an AnalyzerError for a run that is no measurement."""
    # Two loads of the mix: a part of one would have another mean.
    measured = workload.requests(served.checkpoint, load.mix, load.requests, load.mean)
    requests = [*workload.requests(served.checkpoint, load.mix, load.warmup, load.mean), *measured]
    with Sampling(served.server.metrics_url) as counters:
        report = run.measure(
            served.server.grpc_url, requests, load.concurrency, load.warmup, timeout, analyzer=analyzer
        )
    window, whole = report.window, report.whole

    def stepped(name: str) -> float:
        return counters.growth(name, window.begin, window.end)

    def answered(name: str) -> float:
        return counters.growth(name, report.warm, counters.last)

    lengths = [request.output_tokens for request in requests]
    mean_output = sum(lengths) / len(lengths)
    tokens = stepped("llama_generated_tokens_total")
    rate = tokens / window.seconds
    taken = memory_of(served.server.pid)
    measurement: Measurement = {
        **served.subject.to_json(),
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
            round(sum(one.output_tokens for one in measured) / len(measured), 2),
        ),
        "requests": len(report.measured),
        # perf_analyzer gives up at the first one.
        "errors": 0,
        "duration_s": round(window.seconds, 4),
        "output_tokens": round(tokens),
        "requests_per_second": round(rate / mean_output, 4),
        "tokens_per_second": round(rate, 2),
        "whole_run": {
            "requests": len(requests),
            "duration_s": round(whole.seconds, 4),
            "output_tokens": sum(lengths),
            "requests_per_second": round(len(requests) / whole.seconds, 4),
            "tokens_per_second": round(sum(lengths) / whole.seconds, 2),
        },
        "latency_ms": percentiles(report.latencies_s),
        "latencies_s": [round(latency, 4) for latency in report.latencies_s],
        "memory": {
            "kind": taken.kind,
            "weights_mib": round(served.runs.loaded.weights_mib, 1),
            "process_mib": round(taken.mib, 1),
        },
        "mean_rows": _ratio(stepped("llama_step_rows_sum"), stepped("llama_step_rows_count")),
        "mean_batch": _ratio(answered("nv_inference_count"), answered("nv_inference_exec_count")),
        "queue_ms": _ratio(answered("nv_inference_queue_duration_us") / 1e3, answered("nv_inference_count")),
    }
    if rates is not None:
        config = LlamaConfig.from_pretrained(served.checkpoint)
        # Whatever is asked at once may share a step: the device's limit for this load, not the config's.
        limit = physics.best(
            config, served.subject.weights, rates, load.concurrency, lengths, workload.PROMPT_TOKENS, steady=True
        )
        measurement["limit"] = limit.beside(rate)
    return measurement


def _wave_seconds(served: Served, mix: workload.Mix, concurrency: int, mean: int, analyzer: PerfAnalyzer) -> float:
    count = max(concurrency, _FEWEST_FOR_PACE)
    requests = workload.requests(served.checkpoint, mix, count, mean)
    report: AnalyzerReport = run.measure(served.server.grpc_url, requests, concurrency, 0, TIMEOUT_S, analyzer=analyzer)
    return report.whole.seconds * concurrency / count


def _ratio(amount: float, count: float) -> float | None:
    """Return their ratio; None where nothing was counted in the window."""
    return round(amount / count, 3) if count else None
