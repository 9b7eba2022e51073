"""How many requests are measured, from the time there is and the pace that the server was seen at.

A wave is as many requests as are sent at a time. One is the warm-up; then at most three are measured, as many as fit,
and 32 requests at the least: with fewer, a 95th percentile is a maximum. The least is measured even where it doesn't
fit; the size says so, and it is for whoever asked to do without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST = 32
MOST_WAVES = 3


@dataclass(frozen=True)
class Pace:
    """How long a wave takes, by the mean of its output lengths; from waves of two means, `short` and `long` tokens.

    What both have in common, reading the prompts above all, is in the seconds of the shorter one.
    """

    concurrency: int
    short: int
    short_s: float
    long: int
    long_s: float

    def wave_seconds(self, mean: float) -> float:
        """Return how long a wave of this mean should take."""
        per_token = max(0.0, self.long_s - self.short_s) / (self.long - self.short)
        return self.short_s + per_token * (mean - self.short)


@dataclass(frozen=True)
class Size:
    """So many requests, after so many for the warm-up. predicted_s: for both together. available_s: that were given."""

    requests: int
    warmup: int
    predicted_s: float
    available_s: float

    @property
    def fits(self) -> bool:
        """Say whether it should take no longer than was given."""
        return self.predicted_s <= self.available_s

    def describe(self) -> str:
        """Return it in a line."""
        return (
            f"{self.requests} requests after {self.warmup}: about {self.predicted_s:.0f} s "
            f"{'of' if self.fits else 'and not the'} {self.available_s:.0f} s that there are"
        )

    def to_json(self) -> dict[str, object]:
        """Return it for a result's file."""
        return {
            "seconds_available": round(self.available_s, 1),
            "seconds_predicted": round(self.predicted_s, 1),
            "fits": self.fits,
        }


def choose(seconds: float, pace: Pace, mean: float, least: int = LEAST) -> Size:
    """Return how many requests of this mean to measure within so many seconds, by the rule above.

    Whole waves, where there are several.
    """
    wave = pace.concurrency
    each = pace.wave_seconds(mean) / wave
    smallest = max(least, wave)
    fitting = max(smallest, min(MOST_WAVES * smallest, math.floor(seconds / each) - wave))
    requests = fitting - fitting % wave if fitting >= wave else fitting
    return Size(max(requests, smallest), wave, each * (wave + max(requests, smallest)), seconds)
