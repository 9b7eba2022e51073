"""The same requests through a real server, and where a request's time went in it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from triton_local.server import LocalTriton

from perf.load.arrivals import Closed
from perf.load.driver import drive
from perf.load.protocols import Request, Target
from perf.overhead import counters
from perf.overhead.counters import Counters
from perf.overhead.parts import Node
from perf.overhead.processes import MODEL, ServerProcesses, finished_children_seconds

_TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Served:
    """One load. seconds: from the first request to the last answer. latency: mean seconds of a request at its client.

    counted: what the server counted meanwhile. processor_seconds: by process, the load generator's start included.
    """

    seconds: float
    output_tokens: int
    requests: int
    latency: float
    counted: Counters
    processor_seconds: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds

    @property
    def model_processor_seconds(self) -> float:
        """Processor seconds of the process that computes."""
        return self.processor_seconds[MODEL]


def serve(server: LocalTriton, requests: Sequence[Request], concurrency: int) -> Served:
    """Send the requests in a closed loop of so many. Raises RuntimeError if one isn't answered as asked."""
    processes = ServerProcesses.of(server.pid)
    target = Target("triton-llama", "triton_generate", f"http://{server.http_url}", "llama")
    before, worked, generated = counters.read(server), processes.seconds(), finished_children_seconds()
    records = drive(target, requests, Closed(concurrency), warmup=0, timeout=_TIMEOUT_S).measured
    generated = finished_children_seconds() - generated
    used = {name: seconds - worked[name] for name, seconds in processes.seconds().items()}
    wrong = [record for record in records if record.error or record.last_token is None]
    tokens = sum(record.output_tokens for record in records)
    if wrong or tokens != sum(request.output_tokens for request in requests):
        said = wrong[0].error if wrong else f"{tokens} tokens came"
        raise RuntimeError(f"{len(wrong)} of {len(requests)} requests failed: {said}")
    completed = before.metrics["llama_request_latency_seconds_count"] + len(requests)
    return Served(
        seconds=max(record.scheduled + record.latency for record in records)
        - min(record.scheduled for record in records),
        output_tokens=tokens,
        requests=len(requests),
        latency=sum(record.latency for record in records) / len(records),
        counted=counters.read(server, completed) - before,
        processor_seconds={**used, "load generator": generated},
    )


def request_parts(served: Served, tokenization: float) -> Node:
    """Return where a request's time went on average. tokenization: seconds that it takes without a server."""
    counted = served.counted
    queued, first, whole = (
        counted.mean(f"llama_{name}_seconds") for name in ("queue_time", "time_to_first_token", "request_latency")
    )
    request = Node("mean request", seconds=served.latency)
    # What no counter saw: the client, HTTP, JSON, the way to the model's process and the answer's way back.
    request.rest = "the rest of the request: client, HTTP, JSON, Triton's IPC"
    request.take("Triton's queue", counted.stage("queue"))
    request.take("tokenization, as without a server", tokenization)
    request.take("waiting for a slot", queued)
    request.take("prompt to first token", first - queued)
    request.take("decode steps", whole - first)
    return request


def processor_parts(served: Served) -> Node:
    """Return who used the machine's cores during a load: core seconds."""
    whole = Node("cores", seconds=served.seconds * len(os.sched_getaffinity(0)))
    whole.rest = "idle, and everybody else"
    for name, seconds in served.processor_seconds.items():
        whole.take(name, seconds)
    return whole
