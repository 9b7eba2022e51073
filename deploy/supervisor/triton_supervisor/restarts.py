"""How often a dead tritonserver is started again, and after which pause."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

_FIRST_PAUSE_S = 1
_MAX_PAUSE_S = 30


@dataclass(frozen=True)
class Restart:
    """A start again. number, limit: "2 of 5". pause: seconds before it."""

    number: int
    limit: int
    pause: float

    def __str__(self) -> str:
        return f"{self.number} of {self.limit}"


class Restarts:
    """Bounds the restarts within a time: the first follows at once, and each further one after twice the pause.

    total: starts again since the supervisor's own start.
    """

    def __init__(self, limit: int, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        """limit: restarts within `minutes`; 0 restarts nothing."""
        self._limit = limit
        self._minutes = minutes
        self.total = 0
        self._clock = clock
        self._times: deque[float] = deque()

    def after_death(self) -> Restart | None:
        """Count a restart after a death; None beyond the bound."""
        now = self._clock()
        while self._times and now - self._times[0] >= self._minutes * 60:
            self._times.popleft()
        before = len(self._times)
        if before >= self._limit:
            return None
        self._times.append(now)
        self.total += 1
        pause = min(_FIRST_PAUSE_S * 2 ** (before - 1), _MAX_PAUSE_S) if before else 0
        return Restart(before + 1, self._limit, pause)
