"""A run's time: how much there is, how much is left, and lines that say so."""

from __future__ import annotations

import time


class Budget:
    """So many seconds from now on."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self.seconds = seconds

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        """Seconds until the end; negative once it is over."""
        return self.seconds - self.spent

    def say(self, what: str) -> None:
        """Print a line of progress with the time spent and the time there is."""
        print(f"[{self.spent / 60:4.1f} of {self.seconds / 60:.0f} min] {what}", flush=True)
