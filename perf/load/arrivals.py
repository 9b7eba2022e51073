"""When requests arrive: closed or open loop.

A closed loop slows down with the server, so it cannot show what queueing costs: an overloaded server gets less to do.
In an open loop requests arrive whether or not earlier ones are answered, as from independent users.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class Closed:
    """`concurrency` users, each sending its next request when the last one is answered."""

    concurrency: int


@dataclass(frozen=True)
class Poisson:
    """`rate` requests per second on average, with exponential gaps."""

    rate: float
    seed: int

    def moments(self, count: int) -> list[float]:
        """Return the arrival times of `count` requests in seconds from the start; a seed always gives the same ones."""
        randomness = random.Random(self.seed)
        return list(accumulate(randomness.expovariate(self.rate) for _ in range(count)))
