"""The number of guessed tokens of a decode step: the one that maximizes the expected tokens per second.

The time of a step by the number of tokens that it computes is measured at load, then followed while running.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

MEASUREMENT_SECONDS = 0.8
"""Time for the measurement at load. Larger steps that it leaves out are extrapolated."""

_FOLLOWED = 0.1
"""Share of a step's deviation by which the times next to it change."""

_DRIFT = 0.005
"""Share by which all times change: contexts and the machine's load make all steps slower or faster."""


class DraftBudget:
    """Chooses the number of guesses by a step's seconds at powers of two tokens, linear between. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        """limit: maximum tokens of a step."""
        self._tokens = [1 << power for power in range(limit.bit_length())]
        self._seconds: list[float] = []
        # What verifying adds to a step of as many tokens.
        self._verifying = 0.0

    def measure(self, step: Callable[[int], object]) -> None:
        """Measure the times of `step`, which takes a number of tokens, within MEASUREMENT_SECONDS."""
        until = time.monotonic() + MEASUREMENT_SECONDS
        self._seconds = []
        for tokens in self._tokens:
            if len(self._seconds) > 1 and time.monotonic() > until:
                half, whole = self._seconds[-2:]
                self._seconds.append(whole + 2 * max(whole - half, 0.0))
            else:
                self._seconds.append(min(_timed(step, tokens) for _ in range(2)))

    def step_seconds(self, tokens: int) -> float:
        """Return the seconds of a step of that many tokens."""
        known, seconds = self._tokens, self._seconds
        place = min(bisect_right(known, tokens), len(known) - 1)
        if place == 0:
            return seconds[0]
        share = (tokens - known[place - 1]) / (known[place] - known[place - 1])
        return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])

    def best_count(self, sequences: int, probabilities: Sequence[float], gain: float) -> int:
        """Return how many drafted tokens maximize the expected tokens per second; 0 if less than `gain` times without.

        sequences: their number. probabilities: of acceptance, the highest first.
        """
        if not self._seconds:
            return 0
        expected = accumulate(probabilities, initial=float(sequences))
        times = (
            self.step_seconds(sequences + count) + (self._verifying if count else 0.0)
            for count in range(len(probabilities) + 1)
        )
        rates = [tokens / seconds for tokens, seconds in zip(expected, times, strict=True)]
        best = max(range(len(rates)), key=rates.__getitem__)
        return best if rates[best] > gain * rates[0] else 0

    def record(self, tokens: int, seconds: float, verified: bool) -> None:
        """Follow the time of a step; NaN is unknown.

        It counts as at least half and at most twice what was expected, since a step may have been interrupted.
        verified: whether it had drafts.
        """
        if not self._seconds or math.isnan(seconds):
            return
        expected = self.step_seconds(tokens) + (self._verifying if verified else 0.0)
        seconds = min(max(seconds, expected / 2), 2 * expected)
        deviation = seconds / expected - 1
        self._verifying *= 1 - _DRIFT
        if verified:
            self._verifying = max(0.0, self._verifying + _FOLLOWED * (seconds - expected))
        for place, known in enumerate(self._tokens):
            nearness = max(0.0, 1 - abs(tokens - known) / known)
            self._seconds[place] *= 1 + deviation * (_DRIFT + _FOLLOWED * nearness)


def _timed(step: Callable[[int], object], tokens: int) -> float:
    began = time.monotonic()
    step(tokens)
    return time.monotonic() - began
