"""Time of a device's work: called from Python, and without Python.

- `eager`: calls back to back, and one wait for the device at the end. For a kernel of a few microseconds that is the
  cost of the call, not of the kernel.
- `graph`: the same calls captured once as a CUDA graph and replayed: the device's own time. None if they can't be
  captured, because something in them waits for the device.

Several actions, each on data of its own, run in turn: over one buffer, a matrix that fits into the device's cache would
be read from there, as a model's weights never are. The median of the repetitions counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from llama_engine.cuda_graphs import cuda_capture

from perf.course import reason

Action = Callable[[], object]

WAITS = "at a threshold bitsandbytes waits for the device in every layer"
"""Why a product with outliers can't be captured."""


@dataclass(frozen=True)
class Timing:
    """Seconds per call. uncaptured: why there is no graph."""

    eager: float
    graph: float | None
    uncaptured: str | None = None

    def to_json(self) -> dict[str, object]:
        """Return both in microseconds."""
        graph = None if self.graph is None else round(1e6 * self.graph, 2)
        why = {} if self.uncaptured is None else {"uncaptured": self.uncaptured}
        return {"eager_us": round(1e6 * self.eager, 2), "graph_us": graph, **why}


def settle(device: torch.device) -> None:
    """Wait for the device's outstanding work; a CPU has none when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(actions: Sequence[Action], device: torch.device, seconds: float, waits: str | None = None) -> Timing:
    """Time the actions for about `seconds` in all.

    waits: why they can't be captured, if known: a failed capture leaves PyTorch's allocator in an unknown state.
    """

    def each() -> None:
        for action in actions:
            action()

    each()
    settle(device)
    unfit = waits if device.type == "cuda" else "needs CUDA"
    share = seconds if unfit else seconds / 2
    eager = _median(each, device, share) / len(actions)
    if unfit:
        return Timing(eager, None, unfit)
    try:
        replay = cuda_capture(device)(each)
        replay()
        settle(device)
    except Exception as error:  # noqa: BLE001 - whatever can't be captured, the reason is the result
        return Timing(eager, None, reason(error))
    return Timing(eager, _median(replay, device, share) / len(actions))


def _median(action: Action, device: torch.device, seconds: float) -> float:
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while not taken or time.perf_counter() < until:
        settle(device)
        began = time.perf_counter()
        action()
        settle(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
