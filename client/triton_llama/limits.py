"""How long and how many at once: the client's own limits, checked once for both clients."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds and counts.

    Raises:
        ValueError: one of them isn't a positive number.
    """

    timeout: float
    connect_timeout: float
    concurrency: int

    def __post_init__(self) -> None:
        _check_seconds("timeout", self.timeout)
        _check_seconds("connect_timeout", self.connect_timeout)
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}, must be at least 1")

    def request_timeout(self, timeout: float | None) -> float:
        """Return the seconds for one request: those given with it, or the client's."""
        if timeout is None:
            return self.timeout
        _check_seconds("timeout", timeout)
        return timeout


def _check_seconds(name: str, seconds: float) -> None:
    if not (math.isfinite(seconds) and seconds > 0):
        raise ValueError(f"{name} is {seconds}, must be a positive number of seconds")
