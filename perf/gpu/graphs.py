"""What a CUDA graph would do to a decode step: the same step eagerly and replayed, for one bucket of rows and span.

Captured is the whole of it: positions and mask, forward, head, the greedy choice and its way back into the next step's
input; the slot model's own tensors are the static buffers. So a replay is a step, and eager steps and replays of the
same rows must choose the same tokens. Reading the tokens is outside in both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from limit import physics
from limit.rates import DeviceRates
from llama_engine.checkpoint import Checkpoint
from llama_engine.memory import plan_memory
from llama_engine.settings import Settings
from llama_engine.slot_model import SlotModel

from gpu.precision import Precision
from gpu.timing import WAITS, captured, timed

CHECKED_STEPS = 8
"""Of which the tokens are compared."""


@dataclass(frozen=True)
class Bucket:
    """So many rows, whose attention reads `span` positions: a multiple of the slot model's SPAN_BUCKET."""

    rows: int
    span: int


def measure(
    checkpoint: Checkpoint, precision: Precision, bucket: Bucket, rates: DeviceRates, seconds: float
) -> dict[str, object]:
    """Time a bucket's step both ways; on a CPU only the eager one, which is said."""
    device = checkpoint.facts.device
    with torch.inference_mode():
        timing = timed([_StepInPlace(checkpoint, bucket)], device, seconds, WAITS if precision.threshold else None)
        same = None if timing.graph is None else _same_tokens(checkpoint, bucket, device)
    # The last of the span's positions, and the token itself.
    limit = physics.best(
        checkpoint.config, precision.weights, rates, bucket.rows, [2] * bucket.rows, bucket.span - 1
    ).step_seconds
    said = f"graph {1e3 * timing.graph:.2f} ms" if timing.graph is not None else f"no graph: {timing.uncaptured}"
    return {
        **precision.to_json(),
        "rows": bucket.rows,
        "span": bucket.span,
        "eager_ms": round(1e3 * timing.eager, 4),
        "graph_ms": None if timing.graph is None else round(1e3 * timing.graph, 4),
        **({} if timing.uncaptured is None else {"uncaptured": timing.uncaptured}),
        "eager_over_graph": None if timing.graph is None else round(timing.eager / timing.graph, 3),
        "limit_ms": round(1e3 * limit, 4),
        "share_of_limit": round(limit / timing.best, 4),
        **({} if same is None else {"same_tokens": same, "passed": same}),
        "in_short": f"eager {1e3 * timing.eager:.2f} ms, {said}, limit {1e3 * limit:.2f} ms",
    }


class _StepInPlace:
    """A step that can be repeated: rows stay at the end of their span, so that measuring has no end of its own."""

    def __init__(self, checkpoint: Checkpoint, bucket: Bucket) -> None:
        device = checkpoint.facts.device
        planned = plan_memory(replace(checkpoint, max_model_len=bucket.span), Settings(), bucket.rows)
        planned.check()
        self._model = SlotModel(checkpoint, planned.shape)
        self._bucket = bucket
        self.chosen = torch.arange(5, 5 + bucket.rows, device=device)
        self.begin()

    def begin(self) -> None:
        """Put every row at the last position of its span, with a token of its own."""
        self.chosen.copy_(torch.arange(5, 5 + self._bucket.rows))
        self._model.seat(0, [self._bucket.span - 1] * self._bucket.rows)
        self._model.advance(0, self.chosen)

    def __call__(self) -> None:
        logits = self._model.logits(self._model.step(0, self._bucket.rows, self._bucket.span - 1))
        self.chosen.copy_(logits.float().argmax(-1))
        self._model.advance(0, self.chosen)


def _same_tokens(checkpoint: Checkpoint, bucket: Bucket, device: torch.device) -> bool:
    """Say whether replays choose what as many eager steps choose."""
    found: list[list[list[int]]] = []
    for replayed in (False, True):
        step = _StepInPlace(checkpoint, bucket)
        action = captured(step, device).replay if replayed else step
        # Capturing has made steps; they wrote where each step writes again.
        step.begin()
        found.append([])
        for _ in range(CHECKED_STEPS):
            action()
            found[-1].append(step.chosen.tolist())
    return found[0] == found[1]
