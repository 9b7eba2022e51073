"""Whether the engine works: what its thread notes of its rounds, and what that comes to.

Written by the thread that steps and read by any other, without a lock: who asks must not wait for a step that hangs.
Knows steps and the time, and neither rows nor who asks.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from llama_engine.engine import Step

FAILURES_IN_A_ROW = 8
"""Steps that fail one after another until the engine counts as broken: one bad request fails a step, too."""


class Vitals:
    """Notes of the thread that steps."""

    def __init__(self, stuck_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """stuck_seconds: how long a step may take; 0 is as long as it likes."""
        self._stuck_seconds = stuck_seconds or math.inf
        self._clock = clock
        # When the round began that is under way; None while the thread waits for rows.
        self._since: float | None = None
        self._failures = 0

    def resting(self) -> None:
        """Note that there may be nothing to do."""
        self._since = None

    def working(self) -> None:
        """Note that a round begins."""
        self._since = self._clock()

    def stepped(self, step: Step) -> None:
        """Note a step that came back. One that read a part of a prompt says nothing of those that choose tokens."""
        if step.chosen:
            self._failures = 0
        elif step.failed:
            self._failures += 1

    def failed(self) -> None:
        """Note a round that ended in an error outside of its step."""
        self._failures += 1

    @property
    def failing(self) -> bool:
        """Whether nothing but failures came of the last steps."""
        return self._failures >= FAILURES_IN_A_ROW

    def trouble(self) -> str:
        """Return what is wrong, in a few words; nothing if the engine works, or waits for work."""
        # Read once: the other thread goes on.
        since = self._since
        seconds = 0.0 if since is None else self._clock() - since
        if seconds > self._stuck_seconds:
            return f"a step has been running for more than {self._stuck_seconds:g} s"
        return f"{FAILURES_IN_A_ROW} steps or more in a row have failed" if self.failing else ""
