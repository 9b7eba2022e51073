"""Engine health: whether steps end, and whether they produce more than failures.

The engine's thread writes it and any other reads it, without a lock: a reader must not wait for a step that hangs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from llama_engine.engine import StepResult

MAX_FAILED_STEPS = 8
"""Consecutive failed steps before the engine counts as broken: one bad request fails a step, too."""


class EngineHealth:
    """The engine's health, from the steps that its thread records."""

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """stuck_seconds: how long a step may take; 0 disables the check."""
        self._stuck_seconds = stuck_seconds or math.inf
        self._clock = clock
        # Since when the thread has been busy; None while it waits for sequences.
        self._busy_since: float | None = None
        self._failed_steps = 0

    def record_idle(self) -> None:
        """Record that the thread may have to wait for sequences."""
        self._busy_since = None

    def record_busy(self) -> None:
        """Record that the thread begins to schedule and step."""
        self._busy_since = self._clock()

    def record_step(self, step: StepResult) -> None:
        """Record a step that returned. One that only prefills a part of a prompt shows nothing about sampling."""
        if step.sampled:
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
        # Read once: the other thread goes on.
        since = self._busy_since
        seconds = 0.0 if since is None else self._clock() - since
        if seconds > self._stuck_seconds:
            return f"a step has been running for more than {self._stuck_seconds:g} s"
        return f"{MAX_FAILED_STEPS} or more consecutive steps have failed" if self.failing else ""
