"""Timing what a device does: one call as a program makes it, and the same work without the program.

- `eager`: calls as Python makes them, back to back, and the device waited for at the end. A kernel of a few
  microseconds shows what calling it costs, not what it takes.
- `graph`: the same calls, captured once as a CUDA graph and replayed: what the device takes when nobody holds it up.
  None where they can't be captured, because something in them waits for the device.

Several actions, each on data of its own, are called in turn: over one buffer, a matrix that fits into the device's
cache would be read from there, as no decode step can read a model's weights. The median of the repetitions counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from llama_engine.model.cuda_graphs import cuda_capture

from perf.course import reason

Action = Callable[[], object]


@dataclass(frozen=True)
class Timing:
    """Seconds a call. uncaptured: why there is no graph, in a line."""

    eager: float
    graph: float | None
    uncaptured: str | None = None

    @property
    def best(self) -> float:
        """The graph's, where there is one."""
        return self.eager if self.graph is None else self.graph

    def to_json(self) -> dict[str, object]:
        """Return both in microseconds."""
        graph = None if self.graph is None else round(1e6 * self.graph, 2)
        why = {} if self.uncaptured is None else {"uncaptured": self.uncaptured}
        return {"eager_us": round(1e6 * self.eager, 2), "graph_us": graph, **why}


WAITS = "at a threshold bitsandbytes waits for the device in every layer"
"""Why a step with outliers is no graph."""


def settle(device: torch.device) -> None:
    """Wait for what the device still does; a CPU has done everything when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(actions: Sequence[Action], device: torch.device, seconds: float, waits: str | None = None) -> Timing:
    """Time the actions for about so many seconds in all.

    waits: why they can't be captured, where that is known: a capture that fails leaves PyTorch's allocator in doubt.
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
        replay = captured(each, device)
    except Exception as error:  # noqa: BLE001 - whatever can't be captured, the reason is the result
        return Timing(eager, None, reason(error))
    return Timing(eager, _median(replay, device, share) / len(actions))


def captured(action: Action, device: torch.device) -> Action:
    """Return what does the action again as a CUDA graph. Raises what capturing raises."""

    def act() -> None:
        action()

    replay = cuda_capture(device)(act)
    replay()
    settle(device)
    return replay


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
