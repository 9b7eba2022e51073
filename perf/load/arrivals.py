"""When requests come: as soon as an earlier one is answered, or at moments of their own.

A closed loop slows down with the server, so it can't show what waiting costs: an overloaded server gets less to do. In
an open loop requests come whether or not the ones before are answered, as they do from users who don't know each other.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Closed:
    """So many users; each sends its next request when its last one is answered. Raises ValueError below 1."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}, must be at least 1")


@dataclass(frozen=True)
class Poisson:
    """So many requests a second on average, with exponential gaps. Raises ValueError unless finite and above 0."""

    rate: float
    seed: int

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise ValueError(f"rate is {self.rate} requests a second, must be above 0")

    def moments(self, count: int) -> list[float]:
        """Return when `count` requests come, in seconds from the start; the same ones for the same seed."""
        randomness = random.Random(self.seed)
        return list(accumulate(randomness.expovariate(self.rate) for _ in range(count)))
