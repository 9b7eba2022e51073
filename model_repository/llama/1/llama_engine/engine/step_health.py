"""The health of an engine: whether its steps hang, or only fail."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama_engine.engine.step_result import StepResult

MAX_FAILED_STEPS = 8
"""Consecutive failed steps before the engine is considered broken; a single bad request can also fail a step."""


class StepHealth:
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
        """Whether the last MAX_FAILED_STEPS steps produced only failures."""
        return self._failed_steps >= MAX_FAILED_STEPS

    def problem(self) -> str:
        """Return what is wrong, in a few words; empty if the engine works or is idle."""
        # Read the attribute once, because the engine's thread changes it concurrently.
        since = self._busy_since
        seconds = 0.0 if since is None else self._clock() - since
        if seconds > self._stuck_seconds:
            return f"a step has been running for more than {self._stuck_seconds:g} s"
        return f"{MAX_FAILED_STEPS} or more consecutive steps have failed" if self.failing else ""
