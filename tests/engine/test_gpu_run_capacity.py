"""The verdict on memory of a GPU run, from made-up figures of the allocator."""

from __future__ import annotations

import pytest
import torch
from llama_engine.model.kv_cache import KVCacheShape
from llama_engine.model.memory_plan import MemoryPlan

from perf.gpu.capacity import LEFT, MIB, Stretch, against_plan

PLAN = MemoryPlan(
    weights=60 * MIB,
    cache=20 * MIB,
    sampling=10 * MIB,
    reserve=10 * MIB,
    free=200 * MIB,
    fraction=0.9,
    device="cuda",
    shape=KVCacheShape(2, 4, 2, 128, 16, torch.float16),
)


@pytest.mark.parametrize(
    ("peaks", "left", "flat"),
    [
        ((90 * MIB, 95 * MIB, 95 * MIB), LEFT, True),
        ((90 * MIB, 101 * MIB, 101 * MIB), 0, False),  # more than the plan
        ((90 * MIB, 95 * MIB, 95 * MIB), LEFT + 1, False),  # left allocated between steps
        ((90 * MIB, 95 * MIB, 96 * MIB), 0, False),  # a growing peak
        ((80 * MIB, 95 * MIB, 95 * MIB), 0, True),  # growth during the warm-up
    ],
)
def test_memory_must_stay_within_the_plan_and_flat_after_the_warm_up(
    peaks: tuple[int, int, int], left: int, flat: bool
) -> None:
    held = (50 * MIB, 60 * MIB, 60 * MIB + left)
    stretches = [Stretch(10, 1, 0, peak, held) for peak, held in zip(peaks, held, strict=True)]
    figures, verdict, in_short = against_plan(PLAN, stretches)
    assert verdict is flat
    assert figures["left_growth_bytes"] == left
    assert f"of 100 MiB planned, grown by {left:,} bytes" in in_short
