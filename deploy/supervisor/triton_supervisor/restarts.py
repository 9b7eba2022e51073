"""How often a dead tritonserver is started again, and after which pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

START_CRASHES = 2
"""Starts again after tritonserver has crashed before it was ready, whatever the settings: it can lose a race of its own
there (boost::interprocess::lock_exception, triton-inference-server/server issue 8882), and the next start succeeds."""

_FIRST_PAUSE_S = 1
_LONGEST_PAUSE_S = 30


@dataclass(frozen=True)
class Restart:
    """A start again. number, most: "2 of 5". pause: seconds before it."""

    number: int
    most: int
    pause: float

    def __str__(self) -> str:
        return f"{self.number} of {self.most}"


class Restarts:
    """Bounds the restarts within a time: the first follows at once, and each further one after twice the pause.

    total: starts again since the supervisor's own start.
    """

    def __init__(self, most: int, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        """most: restarts within `minutes`; 0 restarts nothing."""
        self._most = most
        self._minutes = minutes
        self.total = 0
        self._clock = clock
        self._times: deque[float] = deque()
        self._start_crashes = 0

    def after_death(self) -> Restart | None:
        """Count a restart after a death; None beyond the bound."""
        now = self._clock()
        while self._times and now - self._times[0] >= self._minutes * 60:
            self._times.popleft()
        before = len(self._times)
        if before >= self._most:
            return None
        self._times.append(now)
        self.total += 1
        pause = min(_FIRST_PAUSE_S * 2 ** (before - 1), _LONGEST_PAUSE_S) if before else 0
        return Restart(before + 1, self._most, pause)

    def exhausted(self) -> str:
        """Return what to say of the restarts when no further one follows; empty without any."""
        number = len(self._times) or self._start_crashes
        if number == 0:
            return ""
        within = f" within {self._minutes:g} minutes" if self._times else ""
        return f", and tritonserver has been started again {number} time{'s' * (number > 1)}{within}"

    def after_start_crash(self) -> Restart | None:
        """Count a start again, at once, after a crash before the first readiness; None beyond START_CRASHES."""
        if self._start_crashes >= START_CRASHES:
            return None
        self._start_crashes += 1
        self.total += 1
        return Restart(self._start_crashes, START_CRASHES, 0)
