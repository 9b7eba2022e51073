"""Measure one point: a server of its own on a changed copy of the repository, its config read back, one load.

Nothing that is tuned can be changed in a running server (all of it is read when the model loads), so every measurement
pays for a start; that also makes two measurements of one point as independent as two points'.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence

from google.protobuf import json_format  # type: ignore[import-untyped]  # ships no annotations
from triton_local.errors import NotReadyError, StartFailedError
from triton_local.repository import MODEL_NAME
from triton_local.server import LocalTriton
from triton_local.supervised import Supervised
from tritonclient.grpc.model_config_pb2 import ModelConfig

from perf import metrics
from perf.load.driver import drive
from perf.load.protocols import Request, Target
from perf.load.summary import summarize
from perf.tune.config import knobs_of
from perf.tune.demand import Demand
from perf.tune.knobs import Knobs
from perf.tune.subject import Subject

_ASK_S = 30.0
_READY_TIMEOUT_S = 900.0


class ReadBackError(Exception):
    """The server runs under other settings than it was given."""


def measure(subject: Subject, demand: Demand, requests: Sequence[Request], knobs: Knobs) -> dict[str, object]:
    """Return a measurement. With settings that the server refuses to start with it says so under `not_run`.

    Raises ReadBackError, other LauncherErrors, and LoadError if the load generator fails.
    """
    known: dict[str, object] = {
        "server": subject.variant,
        "title": knobs.describe(),
        "family": "ours",
        "weights": subject.weights,
        "generator": "locust",
        "settings": {"variant": subject.variant, **knobs.settings()},
        "load": demand.described(),
    }
    with subject.repository(knobs) as repository:
        server = LocalTriton(
            variant=subject.variant,
            model=subject.model,
            model_repository=repository,
            environment={"OMP_NUM_THREADS": str(subject.threads)},
            ready_timeout=_READY_TIMEOUT_S,
            # Nobody but the load may ask the model.
            supervised=Supervised(stuck_after=None),
        )
        try:
            with server:
                return {**known, **_loaded(server, demand, requests, knobs)}
        except (StartFailedError, NotReadyError) as error:
            # A plan that doesn't fit into the memory, say: a fact about this point, and the search goes on.
            return {**known, "not_run": str(error)}


def _loaded(server: LocalTriton, demand: Demand, requests: Sequence[Request], knobs: Knobs) -> dict[str, object]:
    _check(_config(server), knobs)
    target = Target(MODEL_NAME, "triton_generate", f"http://{server.http_url}", MODEL_NAME)
    records = drive(target, requests, demand.arrivals, demand.warmup, demand.timeout)
    summary = summarize(records, None)
    # A server that has failed may not answer this question either.
    return summary if summary["errors"] else {**summary, "mean_rows": _mean_rows(server)}


def _config(server: LocalTriton) -> ModelConfig:
    with urllib.request.urlopen(f"http://{server.http_url}/v2/models/{MODEL_NAME}/config", timeout=_ASK_S) as response:
        return json_format.Parse(response.read(), ModelConfig())


def _check(config: ModelConfig, knobs: Knobs) -> None:
    running = knobs_of(config)
    if running != knobs:
        raise ReadBackError(f"the server runs with {running.describe()}; it was given {knobs.describe()}")


def _mean_rows(server: LocalTriton) -> float:
    """Return the mean rows of a step since the server's start, warm-up included."""
    totals = metrics.read(server.metrics_url)
    return round(totals["llama_step_rows_sum"] / totals["llama_step_rows_count"], 2)
