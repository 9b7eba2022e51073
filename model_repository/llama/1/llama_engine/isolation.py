"""Isolate a failure: compute for many sequences at once, and where that fails, for halves of them."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from llama_engine.sequence import Sequence, names_of

_Output = TypeVar("_Output")

_log = logging.getLogger(__name__)


class Isolation:
    """Runs the computations of one engine; logs and counts those that fail."""

    def __init__(self) -> None:
        self.errors = 0
        """Failed computations."""

    def isolate(
        self, what: str, sequences: list[Sequence], compute: Callable[[list[Sequence]], _Output]
    ) -> tuple[list[_Output], list[Sequence]]:
        """Return the outputs of `compute` over consecutive parts of the sequences, in order, and those that failed.

        If nothing fails there is one part. A part that fails is computed again in halves, down to a single sequence,
        which is finished with an error and has no output. what: names the computation in the log.
        """
        try:
            return [compute(sequences)], []
        except Exception as error:  # noqa: BLE001 - any failure: the other sequences must be computed
            exhausted = self.record(error, f"{what} of {names_of(sequences)}")
        # Outside the handler, where the exception would keep the memory of the failed computation.
        if len(sequences) == 1:
            sequences[0].fail(exhausted)
            return [], sequences
        half = len(sequences) // 2
        outputs, failed = self.isolate(what, sequences[:half], compute)
        other_outputs, other_failed = self.isolate(what, sequences[half:], compute)
        return outputs + other_outputs, failed + other_failed

    def record(self, error: Exception, what: str) -> bool:
        """Count and log a failed computation; return whether it exhausted the device's memory, which is then freed."""
        self.errors += 1
        _log.error("%s failed", what, exc_info=error)
        exhausted = _is_out_of_memory(error)
        if exhausted:
            # The traceback's frames hold the pass's tensors, and what the allocator keeps in pieces may suffice in one.
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
        return exhausted


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the device's memory was exhausted; cuBLAS, cuDNN and bitsandbytes raise plain RuntimeErrors."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and re.search(r"out of memory|ALLOC_FAILED", str(error)) is not None
    )
