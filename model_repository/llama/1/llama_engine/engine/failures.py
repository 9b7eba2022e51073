"""Failures: a computation that fails is isolated, and an engine whose steps hang or only fail is detected."""

from __future__ import annotations

import logging
import math
import re
import time
import traceback
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch

from llama_engine.engine.sequence import Sequence

if TYPE_CHECKING:
    from llama_engine.engine.step_result import StepResult


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
            exhausted = self.record(error, f"{what} of {names_of(sequences)}")
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


MAX_FAILED_STEPS = 8
"""Consecutive failed steps before the engine is considered broken; a single bad request can also fail a step."""


class EngineHealth:
    """The health of one engine, derived from the steps that its thread records."""

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """stuck_seconds: maximum duration of a step; 0 disables the check. clock: monotonic time in seconds."""
        self._stuck_seconds = stuck_seconds or math.inf
        self._clock = clock
        # Time at which the current step began; None while the thread waits for sequences.
        self._busy_since: float | None = None
        self._failed_steps = 0

    def record_idle(self) -> None:
        """Record that the thread is not in a step and may wait for sequences."""
        self._busy_since = None

    def record_busy(self) -> None:
        """Record that the thread begins to schedule and step."""
        self._busy_since = self._clock()

    def record_step(self, step: StepResult) -> None:
        """Record a step that returned. A step that only prefills doesn't reset the count of failed steps."""
        if step.succeeded:
            self._failed_steps = 0
        elif step.failed:
            self._failed_steps += 1

    def record_error(self) -> None:
        """Record a failure outside of a step."""
        self._failed_steps += 1

    @property
    def failing(self) -> bool:
        """Whether the last steps produced only failures."""
        return self._failed_steps >= MAX_FAILED_STEPS

    def problem(self) -> str:
        """Return what is wrong, in a few words; empty if the engine works or is idle."""
        # Read the attribute once, because the engine's thread changes it concurrently.
        since = self._busy_since
        seconds = 0.0 if since is None else self._clock() - since
        if seconds > self._stuck_seconds:
            return f"a step has been running for more than {self._stuck_seconds:g} s"
        return f"{MAX_FAILED_STEPS} or more consecutive steps have failed" if self.failing else ""


def names_of(sequences: Iterable[Sequence]) -> str:
    """Return a name for log messages: the request's id of a single sequence, else the number of sequences."""
    names = [sequence.context.name for sequence in sequences]
    return f"request {names[0]}" if len(names) == 1 and names[0] else f"{len(names)} sequences"
