"""A configuration under the article's load, by perf_analyzer: one entry of a result's measurements.

Throughput is over the steady-state window (`load.records`): the growth of the server's own token counter in it, over
its seconds. Requests per second are tokens per second over the load's mean length, because the answers in the window
are no measure of the work done in it. All else is as in `load.summary`. Queue time and batch are over as many of the
last answers as are measured; Triton counts both when it answers, and where the queue is long most of what it answers in
the window is the warm-up.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from perf.load.protocols import Request
from perf.load.summary import describe, summarize, throughput
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates

Measurement = dict[str, object]
TIMEOUT_S = 3600.0
_SHORT, _LONG = 4, 20
"""Mean lengths, in tokens, of the two waves that the pace is measured with."""
_FEWEST_FOR_PACE = 4
_SLACK_S = 120.0
_SLOWER_THAN_PREDICTED = 4.0


def pace(served: Served, mix: workload.Mix, concurrency: int, analyzer: PerfAnalyzer) -> Pace:
    """Measure the server's pace with two waves of short requests of the same mix, which also warm it up."""

    def seconds(mean: int) -> float:
        count = max(concurrency, _FEWEST_FOR_PACE)
        requests = workload.requests(served.checkpoint, mix, count, mean)
        report = run.measure(served.server.grpc_url, requests, concurrency, 0, TIMEOUT_S, analyzer=analyzer)
        return report.run.whole.seconds * concurrency / count

    # The longer one first: one-time work of a fresh server makes the prediction longer, not shorter.
    long = seconds(_LONG)
    return Pace(concurrency, _SHORT, seconds(_SHORT), _LONG, long)


def sized(
    served: Served, mix: workload.Mix, concurrency: int, size: Size, rates: DeviceRates | None, analyzer: PerfAnalyzer
) -> Measurement:
    """Apply a load of this size to a running server. Raises an AnalyzerError for a run that is no measurement."""
    requests = workload.warm_and_measured(served.checkpoint, mix, size.warmup, size.requests)
    # A server that hangs must not use up the whole run's time.
    timeout = _SLACK_S + _SLOWER_THAN_PREDICTED * size.predicted_s
    with Sampling(served.server.metrics_url) as counters:
        report = run.measure(served.server.grpc_url, requests, concurrency, size.warmup, timeout, analyzer=analyzer)
    records, taken = report.run.records, memory_of(served.server.pid)
    measurement: Measurement = {
        **served.configuration.to_json(),
        "generator": "perf_analyzer",
        "settings": served.settings(),
        "command": report.command,
        "perf_analyzer": {"version": report.version, "server_us": dict(report.server_us)},
        "load": describe(
            mix,
            Closed(concurrency),
            size.requests,
            size.warmup,
            round(sum(record.prompt_tokens or 0 for record in records) / len(records)),
            round(sum(record.output_tokens for record in report.run) / len(report.run), 2),
        ),
        **summarize(report.run, None),
        "memory": {
            "kind": taken.kind,
            "weights_mib": round(served.runs.loaded.weights_mib, 1),
            "process_mib": round(taken.mib, 1),
        },
        **_counted(counters, report, requests),
        "size": {
            "seconds_available": round(size.available_s, 1),
            "seconds_predicted": round(size.predicted_s, 1),
            "fits": size.fits,
        },
    }
    if rates is not None:
        rate = measurement["tokens_per_second"]
        assert isinstance(rate, float)
        config, lengths = LlamaConfig.from_pretrained(served.checkpoint), [one.output_tokens for one in requests]
        # All concurrent requests may share a step: the device's bound for this load, not the config's.
        weights, prompt = served.configuration.weights, workload.PROMPT_TOKENS
        measurement["limit"] = roofline(config, weights, rates, concurrency, lengths, prompt, steady=True).beside(rate)
    return measurement


def _counted(counters: Sampling, report: AnalyzerReport, requests: Sequence[Request]) -> Measurement:
    """Return the figures from the server's counters."""
    window = throughput(report.run).window

    def stepped(name: str) -> float:
        return counters.growth(name, window.begin, window.end)

    def answered(name: str) -> float:
        return counters.growth(name, report.warm, counters.last)

    tokens = stepped("llama_generated_tokens_total")
    rate = tokens / window.seconds
    return {
        "output_tokens": round(tokens),
        "requests_per_second": round(rate * len(requests) / sum(one.output_tokens for one in requests), 4),
        "tokens_per_second": round(rate, 2),
        "mean_rows": _ratio(stepped("llama_step_rows_sum"), stepped("llama_step_rows_count")),
        "mean_batch": _ratio(answered("nv_inference_count"), answered("nv_inference_exec_count")),
        "queue_ms": _ratio(answered("nv_inference_queue_duration_us") / 1e3, answered("nv_inference_count")),
    }


def _ratio(amount: float, count: float) -> float | None:
    """Return the ratio; None where nothing was counted in the window."""
    return round(amount / count, 3) if count else None
