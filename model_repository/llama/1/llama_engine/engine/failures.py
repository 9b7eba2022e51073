"""Isolates failures: a computation over several sequences that fails is repeated in halves."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from llama_engine.engine.sequence import Sequence

_Output = TypeVar("_Output")

_log = logging.getLogger(__name__)


class Isolation:
    """Runs computations of one engine with failure isolation; logs and counts failures."""

    def __init__(self) -> None:
        self.errors = 0
        """Number of failed computations, retries included, since the engine last reset it."""

    def isolate(
        self, what: str, sequences: list[Sequence], compute: Callable[[list[Sequence]], _Output]
    ) -> tuple[list[_Output], list[Sequence]]:
        """Run `compute` over the sequences; return its outputs, one per part, in order, and the failed sequences.

        Without a failure there is one part and one output. A failed part is split in halves and computed again, down to
        a single sequence, which finishes with an error and has no output. what: name of the computation for the log.
        """
        try:
            return [compute(sequences)], []
        except Exception as error:  # noqa: BLE001 - any failure is isolated
            exhausted = self.record(error, f"{what} of {log_name(sequences)}")
        # Retry outside the handler: inside it, the exception's frames would keep the failed computation's tensors
        # alive.
        if len(sequences) == 1:
            sequences[0].fail(exhausted)
            return [], sequences
        half = len(sequences) // 2
        outputs, failed = self.isolate(what, sequences[:half], compute)
        other_outputs, other_failed = self.isolate(what, sequences[half:], compute)
        return outputs + other_outputs, failed + other_failed

    def record(self, error: Exception, what: str) -> bool:
        """Count and log a failed computation; return whether it ran out of device memory, and free its memory then."""
        self.errors += 1
        _log.error("%s failed", what, exc_info=error)
        exhausted = _is_out_of_memory(error)
        if exhausted:
            # The traceback's frames hold the failed pass's tensors; emptying the cache undoes fragmentation.
            traceback.clear_frames(error.__traceback__)
            torch.cuda.empty_cache()
        return exhausted


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether the error means out of memory; cuBLAS, cuDNN and bitsandbytes raise a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and re.search(r"out of memory|ALLOC_FAILED", str(error)) is not None
    )


def log_name(sequences: Iterable[Sequence]) -> str:
    """Return a name for log messages: the request's id of a single sequence, else the number of sequences."""
    names = [sequence.context.name for sequence in sequences]
    return f"request {names[0]}" if len(names) == 1 and names[0] else f"{len(names)} sequences"
