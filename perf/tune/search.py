"""The search: one axis at a time from the config as it is, twice round, and then the best ones again.

1. The config as it is, twice: how far two measurements of the same thing lie apart is what a difference has to exceed.
2. Along each axis (slots, prefill bound, preferred sizes, delay) every value once, the other settings being the best
   so far. Another point takes the lead only if it is better by more than the noise (`choice.py`). A second round
   starts from where the first one ended, and is left out if that is where it began.
3. With the time that is kept for it, the leading points and the config as it is are measured in turn until each has
   been measured three times, so that a lucky measurement doesn't win.

A full grid of these values has hundreds of points, this at most a few dozen; it can miss a combination that is better
only if two settings change together. Points that are in the results already take no time. Measuring is somebody else's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from perf.tune import axes
from perf.tune.allowance import Allowance
from perf.tune.choice import best, shortlist
from perf.tune.knobs import Knobs, run_key
from perf.tune.points import Measurement, Noise, Point, measured_noise

ROUNDS = 2
LEADERS = 3
RUNS = 3
FIRST_RUNS = 2
MOST_REPEATS = 8
SEARCH_SHARE = 0.7
"""Of the time, for steps 1 and 2; the rest is kept for step 3."""

MOST = FIRST_RUNS + ROUNDS * axes.MOST_AROUND + MOST_REPEATS
"""Measurements that a search makes at most."""


class Search:
    """One search.

    most_at_once: requests that the load has under way at most, None if it has no bound.
    measured: the measurements that there are, by `run_key`. measure: makes another one, which then is in `measured`.
    say: takes a line of progress.
    """

    def __init__(
        self,
        default: Knobs,
        slo_p95_ms: float,
        most_at_once: int | None,
        measured: Mapping[str, Measurement],
        measure: Callable[[Knobs, int], None],
        allowance: Allowance,
        say: Callable[[str], None],
    ) -> None:
        self.default = default
        self._slo = slo_p95_ms
        self._most_at_once = most_at_once
        self._measured = measured
        self._measure = measure
        self._allowance = allowance
        self._say = say
        # In the order in which they were first asked for.
        self._runs: dict[Knobs, list[Measurement]] = {}

    @property
    def points(self) -> list[Point]:
        """The points that have been measured."""
        return [Point(knobs, runs) for knobs, runs in self._runs.items()]

    @property
    def noise(self) -> Noise:
        """How far two measurements of one point were apart."""
        return measured_noise(self.points)

    def run(self) -> None:
        """Search until there is nothing more to measure or no time for it."""
        present = self.default
        self._take(present)
        for _ in range(ROUNDS):
            began = present
            for axis in axes.AXES:
                if math.isinf(self.noise.throughput):
                    self._take(present, runs=FIRST_RUNS)
                present = self._along(axis, present)
            if present == began:
                break
        self._repeat_leaders()

    def _along(self, axis: axes.Axis, present: Knobs) -> Knobs:
        """Measure the points of an axis, and return the best of it."""
        tried = [present, *axes.around(present, axis, self._most_at_once)]
        for knobs in tried:
            self._take(knobs, share=SEARCH_SHARE)
        points = [Point(knobs, self._runs[knobs]) for knobs in tried if knobs in self._runs]
        found = best(points, self._slo, self.noise, present)
        if found is None or found.knobs == present:
            return present
        self._say(f"{axis}: {found.knobs.describe()} takes the lead")
        return found.knobs

    def _repeat_leaders(self) -> None:
        for _ in range(MOST_REPEATS):
            leaders = [
                *(point for point in self.points if point.knobs == self.default and not point.failure),
                *shortlist(self.points, self._slo, self.noise, self.default, LEADERS),
            ]
            fewest = min(leaders, key=lambda point: len(point.runs), default=None)
            if fewest is None or len(fewest.runs) >= RUNS or not self._take(fewest.knobs, len(fewest.runs) + 1):
                return

    def _take(self, knobs: Knobs, runs: int = 1, share: float = 1.0) -> bool:
        """See to it that a point has so many runs, if there is time; return whether it has."""
        have = self._runs.get(knobs, [])
        while len(have) < runs and not Point(knobs, have).failure:
            key = run_key(knobs, len(have) + 1)
            if key not in self._measured:
                if not self._allowance.permits(share):
                    return False
                self._make(knobs, len(have) + 1)
            have.append(self._measured[key])
            self._runs[knobs] = have
        return len(have) >= runs

    def _make(self, knobs: Knobs, run: int) -> None:
        number, most = self._allowance.made + 1, min(MOST, self._allowance.most)
        self._say(f"measurement {number} of at most {most}: {knobs.describe()}{f', run {run}' if run > 1 else ''}")
        end = self._allowance.measuring()
        self._measure(knobs, run)
        end()
        made = Point(knobs, [self._measured[run_key(knobs, run)]])
        self._say(f"  {made.failure or f'{made.tokens_per_second:,.1f} tokens/s, p95 {made.p95_ms:,.0f} ms'}")
