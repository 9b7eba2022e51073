"""What a server counts of itself: Triton's statistics of the model and the model's own metrics, and what came to them.

Triton's are of the whole batch-by-batch way into the model; ours (docs/metrics.md) of the rows in it. A metric may be
0.2 s old, so whoever reads after a load waits until all of it is counted.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from triton_local.server import LocalTriton

from perf import metrics

_STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
_TIMEOUT_S = 30.0
_PATIENCE_S = 10.0
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Counters:
    """Sums since the server started. metrics: each series of `setting.metrics`.

    triton: seconds by stage, and under "requests" their number.
    """

    metrics: Mapping[str, float]
    triton: Mapping[str, float]

    def __sub__(self, earlier: Counters) -> Counters:
        """Return what has come since."""
        return Counters(
            {name: value - earlier.metrics.get(name, 0.0) for name, value in self.metrics.items()},
            {name: value - earlier.triton[name] for name, value in self.triton.items()},
        )

    def mean(self, histogram: str) -> float:
        """Return the mean of what one of the model's histograms saw. Raises ValueError if it saw nothing."""
        count = self.metrics[f"{histogram}_count"]
        if not count:
            raise ValueError(f"{histogram} has seen nothing")
        return self.metrics[f"{histogram}_sum"] / count

    def stage(self, name: str) -> float:
        """Return the mean seconds of a request in one of Triton's stages."""
        return self.triton[name] / self.triton["requests"]


def read(server: LocalTriton, completed: float = 0.0) -> Counters:
    """Return the counters, once so many rows are counted as completed. Raises RuntimeError if they never are."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        found = metrics.read(server.metrics_url)
        if found["llama_request_latency_seconds_count"] >= completed:
            return Counters(found, _triton(server))
        if time.monotonic() > until:
            raise RuntimeError(f"{completed:g} rows should be counted as completed, and after {_PATIENCE_S:g} s aren't")
        time.sleep(_PAUSE_S)


def _triton(server: LocalTriton) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{server.http_url}/v2/models/llama/stats", timeout=_TIMEOUT_S) as response:
        (model,) = json.load(response)["model_stats"]
    statistics = model["inference_stats"]
    seconds = {stage: statistics[stage]["ns"] / 1e9 for stage in _STAGES}
    return {**seconds, "requests": float(statistics["success"]["count"])}
