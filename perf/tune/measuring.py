"""One measurement of a point: a new server on a changed copy of the repository, its config read back, one load.

The tuned settings are read when the model loads, so every measurement starts a server; that also makes two measurements
of one point as independent as those of two points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
from google.protobuf import json_format  # type: ignore[import-untyped]  # ships no annotations
from triton_local.errors import NotReadyError, StartFailedError
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf import metrics, workload
from perf.load.arrivals import Closed, Poisson
from perf.load.generator import drive
from perf.load.protocols import Request, Target
from perf.load.summary import describe, summarize
from perf.servers.triton import local_triton
from perf.tune.config import Subject, knobs_of
from perf.tune.points import Knobs

_TIMEOUT_S = 30.0


class ReadBackError(Exception):
    """The server runs with other settings than it was given."""


@dataclass(frozen=True)
class Demand:
    """The load of every point. requests: measured ones, after `warmup` others. timeout: seconds for all of them."""

    mix: workload.Mix
    arrivals: Closed | Poisson
    requests: int
    warmup: int
    output_tokens: int
    timeout: float

    @property
    def most_at_once(self) -> int | None:
        """The maximum of requests in flight; None in an open loop."""
        return min(self.arrivals.concurrency, self.requests) if isinstance(self.arrivals, Closed) else None

    def sent(self, checkpoint: Path) -> list[Request]:
        """Return all requests, the warm-up's first."""
        return workload.warm_and_measured(checkpoint, self.mix, self.warmup, self.requests, self.output_tokens)

    def to_json(self) -> dict[str, object]:
        """Return a measurement's "load"."""
        return describe(self.mix, self.arrivals, self.requests, self.warmup, workload.PROMPT_TOKENS, self.output_tokens)

    def in_words(self) -> str:
        """Return the load in words."""
        load, tokens = self.arrivals, self.output_tokens
        rate = f"{load.concurrency} at a time" if isinstance(load, Closed) else f"{load.rate:g} per second (Poisson)"
        return f"{self.requests} requests of {tokens} new tokens on average ({self.mix} lengths), {rate}"


def measure(subject: Subject, demand: Demand, requests: Sequence[Request], knobs: Knobs) -> dict[str, object]:
    """Return a measurement; `not_run` if the server refuses to start with these settings.

    Raises ReadBackError and other LauncherErrors.
    """
    known: dict[str, object] = {
        "server": subject.variant,
        "title": knobs.describe(),
        "family": "ours",
        "weights": subject.weights,
        "generator": "asyncio",
        "settings": {"variant": subject.variant, **asdict(knobs)},
        "load": demand.to_json(),
    }
    with subject.repository(knobs) as repository:
        server = local_triton(
            variant=subject.variant,
            model=subject.model,
            model_repository=repository,
            environment={"OMP_NUM_THREADS": str(subject.threads)},
        )
        try:
            with server:
                return {**known, **_under_load(server, demand, requests, knobs)}
        except (StartFailedError, NotReadyError) as error:
            # Such as a memory plan that doesn't fit: a fact about this point, and the search continues.
            return {**known, "not_run": str(error)}


def _under_load(server: LocalTriton, demand: Demand, requests: Sequence[Request], knobs: Knobs) -> dict[str, object]:
    config = httpx.get(f"http://{server.http_url}/v2/models/{MODEL_NAME}/config", timeout=_TIMEOUT_S)
    running = knobs_of(json_format.Parse(config.raise_for_status().content, ModelConfig()))
    if running != knobs:
        raise ReadBackError(f"the server runs with {running.describe()}; it was given {knobs.describe()}")
    target = Target(MODEL_NAME, "triton_generate", f"http://{server.http_url}", MODEL_NAME)
    summary = summarize(drive(target, requests, demand.arrivals, demand.warmup, demand.timeout), None)
    if summary["errors"]:
        # A server that has failed may not have metrics either.
        return summary
    totals = metrics.read(server.metrics_url)
    # Per step since the server's start, warm-up included.
    return {**summary, "mean_rows": round(totals["llama_step_rows_sum"] / totals["llama_step_rows_count"], 2)}
