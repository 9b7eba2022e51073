"""The same requests through a real server, and the parts of a request's time there.

The parts come from the server's own counters: Triton's cover the way of a batch into the model, the model's metrics
(docs/metrics.md) the rows in it.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from triton_local.server import LocalTriton

from perf import metrics
from perf.load.arrivals import Closed
from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.overhead.processes import ServerProcesses
from perf.overhead.stopwatch import Node

_LOAD_TIMEOUT_S = 3600.0
_COUNTED_WITHIN_S = 10.0
_POLL_S = 0.05


class Served(NamedTuple):
    """One load. seconds: from the first request to the last answer. latency: a request's mean seconds at its client.

    counted: the counters' growth. processor_seconds: by process, including the load generator's start.
    """

    seconds: float
    latency: float
    counted: Mapping[str, float]
    processor_seconds: Mapping[str, float]

    def mean(self, name: str) -> float:
        """Return the mean of a histogram's observations. Raises ValueError if there are none."""
        count = self.counted[f"llama_{name}_seconds_count"]
        if not count:
            raise ValueError(f"{name} has no observations")
        return self.counted[f"llama_{name}_seconds_sum"] / count


def serve(server: LocalTriton, requests: Sequence[Request], concurrency: int) -> Served:
    """Send the requests in a closed loop. Raises RuntimeError if one isn't answered as asked."""
    processes = ServerProcesses.of(server.pid)
    target = Target("triton-llama", "triton_generate", f"http://{server.http_url}", "llama")
    before, worked, generated = metrics.read(server.metrics_url), processes.seconds(), _finished_children_seconds()
    run = drive(target, requests, Closed(concurrency), warmup=0, timeout=_LOAD_TIMEOUT_S)
    generated = _finished_children_seconds() - generated
    used = {name: seconds - worked[name] for name, seconds in processes.seconds().items()}
    if wrong := [record.error for record in run.records if record.error]:
        raise RuntimeError(f"{len(wrong)} of {len(requests)} requests failed: {wrong[0]}")
    after = _counted(server, before["llama_request_latency_seconds_count"] + len(requests))
    return Served(
        seconds=run.whole.seconds,
        latency=statistics.fmean(record.latency for record in run.records),
        counted={name: value - before.get(name, 0.0) for name, value in after.items()},
        processor_seconds={**used, "load generator": generated},
    )


def _counted(server: LocalTriton, completed: float) -> dict[str, float]:
    """Return the counters once `completed` rows are counted, since metrics may be 0.2 s old. Raises RuntimeError."""
    until = time.monotonic() + _COUNTED_WITHIN_S
    while (found := metrics.read(server.metrics_url))["llama_request_latency_seconds_count"] < completed:
        if time.monotonic() > until:
            raise RuntimeError(f"{completed:g} rows are not counted as completed after {_COUNTED_WITHIN_S:g} s")
        time.sleep(_POLL_S)
    return found


def _finished_children_seconds() -> float:
    """Return the processor seconds of this process's children that have ended and been reaped: load generators."""
    times = os.times()
    return times.children_user + times.children_system


def request_parts(served: Served, tokenization: float) -> Node:
    """Return the parts of a mean request's time. tokenization: its seconds, measured without a server."""
    counted = served.counted
    queued, first, whole = map(served.mean, ("queue_time", "time_to_first_token", "request_latency"))
    request = Node("mean request", seconds=served.latency)
    # No counter covers the client, HTTP, JSON and the transfers between Triton and the model's process.
    request.rest = "the rest of the request: client, HTTP, JSON, Triton's IPC"
    in_triton = counted["nv_inference_queue_duration_us"] / 1e6
    request.take("Triton's queue", in_triton / counted["nv_inference_request_success"])
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
