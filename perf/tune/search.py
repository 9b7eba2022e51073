"""The search: one axis at a time from the present config, two rounds, then the best points again.

1. The present config is measured twice: a difference must exceed that between two measurements of the same point.
2. Along each axis (slots, prefill bound, preferred sizes, delay) every value once, with the other settings at the best
   so far. A point takes the lead only if it is better by more than the noise. A second round starts where the first
   ended, and is left out if that is where it began.
3. In the time reserved for it, the leading points and the present config are measured in turn until each has three
   runs, so that a lucky measurement doesn't win.

Values are halves and doubles, because a batching setting that matters does so over a wide range. Slots come first: they
bound the batch, and the preferred sizes follow them. A full grid has hundreds of points, this at most a few dozen; it
can miss a combination that is better only if two settings change together. Existing results are not measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from llama_engine.bounds import Integer
from llama_engine.settings import BOUNDS

from perf.course import Budget
from perf.tune.points import Knobs, Measurement, Noise, Point, best

AXES = ("slots", "prefill", "preferred", "delay")
_SLOT_FACTORS = (0.25, 0.5, 1, 2, 4)
_PREFILL_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
_DELAYS = (0, 1_000, 10_000, 50_000)
_SMALLEST_PREFERRED = 4

ROUNDS = 2
LEADERS = 3
RUNS = 3
FIRST_RUNS = 2
MOST_REPEATS = 8
SEARCH_SHARE = 0.7
"""Of the time, for steps 1 and 2; the rest is reserved for step 3."""


@dataclass
class Search:
    """One search.

    most_at_once: maximum of requests in flight under the load, None if unbounded. measured: existing measurements by
    `Knobs.key`. measure: makes another one and adds it to `measured`.
    """

    present: Knobs
    slo_p95_ms: float
    most_at_once: int | None
    measured: Mapping[str, Measurement]
    measure: Callable[[Knobs, int], None]
    budget: Budget
    _longest: float = 0.0
    # In the order of their first measurement.
    _runs: dict[Knobs, list[Measurement]] = field(default_factory=dict)

    @property
    def points(self) -> list[Point]:
        """The measured points."""
        return [Point(knobs, runs) for knobs, runs in self._runs.items()]

    @property
    def noise(self) -> Noise:
        """The noise so far."""
        return Noise.of(self.points)

    def run(self) -> None:
        """Search until there is nothing left to measure or no time."""
        leader = self.present
        self._take(leader)
        for _ in range(ROUNDS):
            began = leader
            for axis in AXES:
                if math.isinf(self.noise.throughput):
                    self._take(leader, runs=FIRST_RUNS)
                leader = self._along(axis, leader)
            if leader == began:
                break
        self._repeat_leaders()

    def _along(self, axis: str, leader: Knobs) -> Knobs:
        """Measure the points of an axis; return the best."""
        tried = [leader, *around(leader, axis, self.most_at_once)]
        for knobs in tried:
            self._take(knobs, share=SEARCH_SHARE)
        points = [Point(knobs, self._runs[knobs]) for knobs in tried if knobs in self._runs]
        found = best(points, self.slo_p95_ms, self.noise, leader)
        if found is None or found.knobs == leader:
            return leader
        self.budget.say(f"{axis}: {found.knobs} takes the lead")
        return found.knobs

    def _repeat_leaders(self) -> None:
        for _ in range(MOST_REPEATS):
            leaders = [point for point in self.points if point.knobs == self.present and not point.failure]
            others = self.points
            for _ in range(LEADERS):
                if (found := best(others, self.slo_p95_ms, self.noise, self.present)) is not None:
                    leaders.append(found)
                    others.remove(found)
            fewest = min(leaders, key=lambda point: len(point.runs), default=None)
            if fewest is None or len(fewest.runs) >= RUNS or not self._take(fewest.knobs, len(fewest.runs) + 1):
                return

    def _take(self, knobs: Knobs, runs: int = 1, share: float = 1.0) -> bool:
        """Measure a point until it has that many runs, within this share of the budget; return whether it has."""
        have = self._runs.get(knobs, [])
        while len(have) < runs and not Point(knobs, have).failure:
            key = knobs.key(len(have) + 1)
            if key not in self.measured:
                # A measurement begins only if one as long as the longest so far fits.
                began = self.budget.spent
                if began + self._longest >= share * self.budget.seconds:
                    return False
                self.budget.say(key)
                self.measure(knobs, len(have) + 1)
                self._longest = max(self._longest, self.budget.spent - began)
                made = Point(knobs, [self.measured[key]])
                self.budget.say(f"  {made.failure or made}")
            have.append(self.measured[key])
            self._runs[knobs] = have
        return len(have) >= runs


def around(knobs: Knobs, axis: str, most_at_once: int | None) -> list[Knobs]:
    """Return the points of one axis through `knobs`, without itself.

    most_at_once: maximum of requests in flight; more slots can't be filled and aren't tried.
    """
    if axis == "slots":
        slots = [_bounded("slots", knobs.slots * factor, most_at_once) for factor in _SLOT_FACTORS]
        points = [replace(knobs, slots=count, preferred_batch_size=up_to(count)) for count in slots]
    elif axis == "prefill":
        tokens = [_bounded("prefill_tokens", knobs.prefill_tokens * factor) for factor in _PREFILL_FACTORS]
        points = [replace(knobs, prefill_tokens=count) for count in tokens]
    elif axis == "preferred":
        # Full batches only are Triton's default.
        points = [replace(knobs, preferred_batch_size=sizes) for sizes in ((knobs.slots,), up_to(knobs.slots))]
    else:
        points = [replace(knobs, max_queue_delay_microseconds=delay) for delay in _DELAYS]
    return [point for point in dict.fromkeys(points) if point != knobs]


def up_to(slots: int) -> tuple[int, ...]:
    """Return the preferred sizes for a number of slots: the doubles of 4, and the full batch."""
    doubles = [_SMALLEST_PREFERRED << power for power in range(slots.bit_length())]
    return (*[size for size in doubles if size < slots], slots)


def _bounded(setting: str, value: float, most: int | None = None) -> int:
    bound = BOUNDS[setting]
    assert isinstance(bound, Integer)
    assert bound.low is not None
    assert bound.high is not None
    return max(bound.low, min(int(value), bound.high, most or bound.high))
