"""A run of a load as an entry of a result's measurements; and a configuration under the article's load.

The article's runs are perf_analyzer's. Their throughput is over the steady-state window (`load.records`), too, but from
the growth of the server's own token counter in it. Queue time and batch are over as many of the last answers as are
measured; Triton counts both when it answers, and where the queue is long most of what it answers in the window is the
warm-up.

How many requests are measured follows from the time available and the server's measured pace. A wave is one request per
user. One wave is the warm-up; then at most three are measured, as many as fit, and at least 32 requests: with fewer, a
95th percentile is a maximum.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from transformers import LlamaConfig

from perf import workload
from perf.analyzer import run as analyzer
from perf.analyzer.binary import VERSION
from perf.bench.counters import Samples, sampled
from perf.course import Course
from perf.environment import memory_of
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.protocols import Request
from perf.load.records import Run
from perf.load.summary import describe, summarize
from perf.roofline.physics import roofline
from perf.roofline.rates import DeviceRates
from perf.servers.running import NotRunError, Running, Server
from perf.servers.triton import Configuration, Served

Measurement = dict[str, object]
MIN_REQUESTS = 32
MAX_WAVES = 3
_SHORT, _LONG = 4, 20
"""Mean lengths, in tokens, of the two waves that the pace is measured with."""
_MIN_FOR_PACE = 4
PACE_S = 3600.0
"""Upper bound for a wave of the pace."""
_SLACK_S = 120.0
_SLOWER_THAN_PREDICTED = 4.0


class Pace(NamedTuple):
    """The seconds of a wave by its mean output length, from a short and a long wave.

    Their common part, above all the prefill, is in the seconds of the short one.
    """

    concurrency: int
    short_s: float
    long_s: float

    def seconds(self, requests: int, mean: float = workload.MEAN_OUTPUT) -> float:
        """Return the predicted seconds of that many requests of this mean."""
        per_token = max(0.0, self.long_s - self.short_s) / (_LONG - _SHORT)
        return (self.short_s + per_token * (mean - _SHORT)) * requests / self.concurrency


def measured_pace(
    running: Running, checkpoint: Path, mix: workload.Mix, concurrency: int, timeout: float = PACE_S
) -> Pace:
    """Measure the server's pace with two waves of short requests, which also warm it up.

    timeout: seconds for each. A configuration gets them from perf_analyzer over gRPC, as the load that follows. Raises
    NotRunError or an AnalyzerError if a request is not answered as asked.
    """

    def seconds(mean: int) -> float:
        count = max(concurrency, _MIN_FOR_PACE)
        requests = workload.requests(checkpoint, mix, count, mean)
        if isinstance(running, Served):
            run, _ = analyzer.measure(running.triton.grpc_url, requests, concurrency, 0, timeout)
        else:
            run = drive(running.target, requests, Closed(concurrency), 0, timeout)
        if failed := [record.error for record in run.records if record.error]:
            raise NotRunError(f"{len(failed)} of its first {count} requests failed: {failed[0]}")
        return run.whole.seconds * concurrency / count

    # The longer one first: one-time work of a fresh server makes the prediction longer, not shorter.
    long = seconds(_LONG)
    return Pace(concurrency, seconds(_SHORT), long)


def choose(seconds: float, pace: Pace) -> int:
    """Return how many requests to measure within the seconds, after a warm-up of a wave; whole waves."""
    wave = pace.concurrency
    smallest = max(MIN_REQUESTS, wave)
    fitting = max(smallest, min(MAX_WAVES * smallest, math.floor(seconds / pace.seconds(1)) - wave))
    return max(fitting - fitting % wave, smallest)


def entry(
    server: Server | Configuration,
    running: Running,
    checkpoint: Path,
    mix: workload.Mix,
    run: Run,
    requests: Sequence[Request],
    rates: DeviceRates,
    warmup_counts: bool = False,
    output_rate: float | None = None,
) -> Measurement:
    """Return the measurement of a run of these requests.

    warmup_counts: whether the prompts' mean length and the limit are of all requests, not only of the measured ones.
    output_rate: tokens/s as the server counted them, for the share of the limit, instead of the generator's.

    A closed loop has the device's limit for this load in these weights, for any server (all concurrent requests may
    share a step); an open one has none, as the server gets what is sent.
    """
    first = 0 if warmup_counts else run.warmup
    lengths = [request.output_tokens for request in requests[run.warmup :]]
    counted = [record.prompt_tokens for record in run.records[first:] if record.prompt_tokens is not None]
    prompt = round(statistics.mean(counted)) if counted else workload.PROMPT_TOKENS
    measurement: Measurement = {
        **server.to_json(),
        "generator": "asyncio",
        "settings": dict(running.settings),
        "command": running.command,
        "load": describe(mix, run.arrivals, len(lengths), run.warmup, prompt, round(statistics.fmean(lengths), 2)),
        **summarize(run, None),
        **_memory(running),
    }
    rate = measurement.get("tokens_per_second") if output_rate is None else output_rate
    if isinstance(run.arrivals, Closed) and isinstance(rate, float):
        config, rows = LlamaConfig.from_pretrained(checkpoint), run.arrivals.concurrency
        bounded = [request.output_tokens for request in requests[first:]]
        floats = server.floats if isinstance(server, Server) else None
        bound = roofline(config, server.weights, rates, rows, bounded, workload.PROMPT_TOKENS, True, floats)
        measurement["limit"] = bound.beside(rate)
    return measurement


def article_entry(
    course: Course,
    configuration: Configuration,
    served: Served,
    checkpoint: Path,
    mix: workload.Mix,
    concurrency: int,
    rates: DeviceRates,
    seconds: float,
) -> Measurement:
    """Apply the load to a running server, as many requests as fit into the seconds, MIN_REQUESTS at any rate.

    Raises NoTimeError if the budget is less than they take, an AnalyzerError for a run that is no measurement.
    """
    pace = measured_pace(served, checkpoint, mix, concurrency)
    count = choose(seconds, pace)
    predicted = pace.seconds(concurrency + count)
    course.refuse_without(predicted)
    requests = workload.warm_and_measured(checkpoint, mix, concurrency, count)
    # A server that hangs must not use up the whole run's time.
    timeout = _SLACK_S + _SLOWER_THAN_PREDICTED * predicted
    with sampled(served.triton.metrics_url) as counters:
        run, command = analyzer.measure(served.triton.grpc_url, requests, concurrency, concurrency, timeout)
    counted = _counted(counters, run, requests)
    rate = counted["tokens_per_second"]
    assert isinstance(rate, float)
    return {
        **entry(configuration, served, checkpoint, mix, run, requests, rates, warmup_counts=True, output_rate=rate),
        "generator": "perf_analyzer",
        "command": command,
        "perf_analyzer": {"version": VERSION},
        **counted,
    }


def _memory(running: Running) -> Measurement:
    try:
        kind, mib = memory_of(running.pid)
    except (FileNotFoundError, ProcessLookupError):
        # It has ended; the requests that it did not answer are errors in the measurement.
        return {}
    return {"memory": {"kind": kind, "weights_mib": round(running.weights_mib, 1), "process_mib": round(mib, 1)}}


def _counted(counters: Samples, run: Run, requests: Sequence[Request]) -> Measurement:
    """Return the figures from the server's counters."""
    window = run.steady or run.whole
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
    return {
        "output_tokens": round(tokens),
        "requests_per_second": round(rate / statistics.mean(one.output_tokens for one in requests), 4),
        "tokens_per_second": round(rate, 2),
        "mean_rows": ratio(stepped("llama_step_rows_sum"), stepped("llama_step_rows_count")),
        "mean_batch": ratio(answered("nv_inference_count"), answered("nv_inference_exec_count")),
        "queue_ms": ratio(answered("nv_inference_queue_duration_us") / 1e3, answered("nv_inference_count")),
    }
