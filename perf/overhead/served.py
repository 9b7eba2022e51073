"""The same requests through a real server, and the parts of a request's time there.

The parts come from the server's own counters: Triton's statistics cover the way of a batch into the model, the model's
metrics (docs/metrics.md) the rows in it.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from triton_local.server import LocalTriton

from perf import metrics
from perf.load.arrivals import Closed
from perf.load.driver import drive
from perf.load.protocols import Request, Target
from perf.overhead.processes import ServerProcesses, finished_children_seconds
from perf.overhead.stopwatch import Node

_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
_TIMEOUT_S = 30.0
_LOAD_TIMEOUT_S = 3600.0
_COUNTED_WITHIN_S = 10.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Counters:
    """Sums since the server's start. metrics: of `perf.metrics`. triton: seconds by stage, and "requests"."""

    metrics: Mapping[str, float]
    triton: Mapping[str, float]

    def __sub__(self, earlier: Counters) -> Counters:
        """Return the growth since then."""
        return Counters(
            {name: value - earlier.metrics.get(name, 0.0) for name, value in self.metrics.items()},
            {name: value - earlier.triton[name] for name, value in self.triton.items()},
        )

    def mean(self, histogram: str) -> float:
        """Return the mean of a histogram's observations. Raises ValueError if there are none."""
        count = self.metrics[f"{histogram}_count"]
        if not count:
            raise ValueError(f"{histogram} has no observations")
        return self.metrics[f"{histogram}_sum"] / count


def read(server: LocalTriton, completed: float = 0.0) -> Counters:
    """Return the counters once `completed` rows are counted, since metrics may be 0.2 s old. Raises RuntimeError."""
    until = time.monotonic() + _COUNTED_WITHIN_S
    while (found := metrics.read(server.metrics_url))["llama_request_latency_seconds_count"] < completed:
        if time.monotonic() > until:
            raise RuntimeError(f"{completed:g} rows are not counted as completed after {_COUNTED_WITHIN_S:g} s")
        time.sleep(_POLL_S)
    with urllib.request.urlopen(f"http://{server.http_url}/v2/models/llama/stats", timeout=_TIMEOUT_S) as response:
        (model,) = json.load(response)["model_stats"]
    statistics = model["inference_stats"]
    seconds = {stage: statistics[stage]["ns"] / 1e9 for stage in _STAGES}
    return Counters(found, {**seconds, "requests": float(statistics["success"]["count"])})


@dataclass(frozen=True)
class Served:
    """One load. seconds: from the first request to the last answer. latency: a request's mean seconds at its client.

    counted: the counters' growth. processor_seconds: by process, including the load generator's start.
    """

    seconds: float
    output_tokens: int
    requests: int
    latency: float
    counted: Counters
    processor_seconds: dict[str, float]


def serve(server: LocalTriton, requests: Sequence[Request], concurrency: int) -> Served:
    """Send the requests in a closed loop. Raises RuntimeError if one isn't answered as asked."""
    processes = ServerProcesses.of(server.pid)
    target = Target("triton-llama", "triton_generate", f"http://{server.http_url}", "llama")
    before, worked, generated = read(server), processes.seconds(), finished_children_seconds()
    records = drive(target, requests, Closed(concurrency), warmup=0, timeout=_LOAD_TIMEOUT_S).measured
    generated = finished_children_seconds() - generated
    used = {name: seconds - worked[name] for name, seconds in processes.seconds().items()}
    wrong = [record for record in records if record.error or record.last_token is None]
    tokens = sum(record.output_tokens for record in records)
    if wrong or tokens != sum(request.output_tokens for request in requests):
        cause = wrong[0].error if wrong else f"{tokens} tokens came"
        raise RuntimeError(f"{len(wrong)} of {len(requests)} requests failed: {cause}")
    completed = before.metrics["llama_request_latency_seconds_count"] + len(requests)
    return Served(
        seconds=max(record.scheduled + record.latency for record in records)
        - min(record.scheduled for record in records),
        output_tokens=tokens,
        requests=len(requests),
        latency=sum(record.latency for record in records) / len(records),
        counted=read(server, completed) - before,
        processor_seconds={**used, "load generator": generated},
    )


def request_parts(served: Served, tokenization: float) -> Node:
    """Return the parts of a mean request's time. tokenization: its seconds, measured without a server."""
    counted = served.counted
    queued, first, whole = (
        counted.mean(f"llama_{name}_seconds") for name in ("queue_time", "time_to_first_token", "request_latency")
    )
    request = Node("mean request", seconds=served.latency)
    # No counter covers the client, HTTP, JSON and the transfers between Triton and the model's process.
    request.rest = "the rest of the request: client, HTTP, JSON, Triton's IPC"
    request.take("Triton's queue", counted.triton["queue"] / counted.triton["requests"])
    request.take("tokenization, as without a server", tokenization)
    request.take("waiting for a slot", queued)
    request.take("prompt to first token", first - queued)
    request.take("decode steps", whole - first)
    return request


def processor_parts(served: Served) -> Node:
    """Return the core seconds of the load, by process."""
    whole = Node("cores", seconds=served.seconds * len(os.sched_getaffinity(0)))
    whole.rest = "idle, and other processes"
    for name, seconds in served.processor_seconds.items():
        whole.take(name, seconds)
    return whole
