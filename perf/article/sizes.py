"""How many requests to measure, from the time available and the server's measured pace.

A wave is one request per user. One wave is the warm-up; then at most three are measured, as many as fit, and at least
32 requests: with fewer, a 95th percentile is a maximum. A minimum that does not fit is reported as such; the caller
decides whether to skip it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 32
MOST_WAVES = 3


@dataclass(frozen=True)
class Pace:
    """The seconds of a wave by its mean output length, from waves of two means, `short` and `long` tokens.

    Their common part, above all the prefill, is in the seconds of the shorter one.
    """

    concurrency: int
    short: int
    short_s: float
    long: int
    long_s: float

    def wave_seconds(self, mean: float) -> float:
        """Return the predicted seconds of a wave of this mean."""
        per_token = max(0.0, self.long_s - self.short_s) / (self.long - self.short)
        return self.short_s + per_token * (mean - self.short)


@dataclass(frozen=True)
class Size:
    """requests: measured, after `warmup` others. predicted_s, available_s: seconds for both together."""

    requests: int
    warmup: int
    predicted_s: float
    available_s: float

    @property
    def fits(self) -> bool:
        """Whether the prediction is within the time available."""
        return self.predicted_s <= self.available_s

    def describe(self) -> str:
        """Return it in a line."""
        return (
            f"{self.requests} requests after {self.warmup}: about {self.predicted_s:.0f} s "
            f"{'of' if self.fits else 'and not the'} {self.available_s:.0f} s available"
        )


def choose(seconds: float, pace: Pace, mean: float, least: int = LEAST) -> Size:
    """Return how many requests of this mean to measure within the seconds, by the rule above; whole waves."""
    wave = pace.concurrency
    each = pace.wave_seconds(mean) / wave
    smallest = max(least, wave)
    fitting = max(smallest, min(MOST_WAVES * smallest, math.floor(seconds / each) - wave))
    requests = max(fitting - fitting % wave if fitting >= wave else fitting, smallest)
    return Size(requests, wave, each * (wave + requests), seconds)
