"""Isolate a failure: compute for many sequences at once, and where that fails, for halves of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from llama_engine.sequence import Sequence

_Output = TypeVar("_Output")


def compute_isolated(
    sequences: list[Sequence],
    compute: Callable[[list[Sequence]], _Output],
    on_error: Callable[[list[Sequence], Exception], bool],
    on_failed: Callable[[Sequence], _Output],
) -> list[_Output]:
    """Return the outputs of `compute` over consecutive parts of the sequences, in order; one part if nothing fails.

    A part that fails is computed again in halves, down to the sequence that fails alone, which gets an error. on_error:
    logs a failed part and returns whether it exhausted the device's memory. on_failed: the output of a sequence that
    has failed.
    """
    try:
        return [compute(sequences)]
    except Exception as error:  # noqa: BLE001 - any failure: the other sequences must be computed
        exhausted = on_error(sequences, error)
    # Outside the handler, where the exception would keep the memory of the failed computation.
    if len(sequences) == 1:
        sequences[0].fail(exhausted)
        return [on_failed(sequences[0])]
    half = len(sequences) // 2
    return [
        *compute_isolated(sequences[:half], compute, on_error, on_failed),
        *compute_isolated(sequences[half:], compute, on_error, on_failed),
    ]


def exhausted_memory(error: Exception) -> bool:
    """Return whether a failed computation exhausted the device's memory; if so, free what it holds."""
    exhausted = isinstance(error, torch.OutOfMemoryError)
    if exhausted:
        # The traceback's frames hold the pass's tensors, and what the allocator keeps in pieces may suffice in one.
        traceback.clear_frames(error.__traceback__)
        torch.cuda.empty_cache()
    return exhausted
