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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from llama_engine.settings import BOUNDS, Integer

from perf.tune.points import Batcher, Knobs, Measurement, Noise, Point, measured_noise, run_key

Axis = Literal["slots", "prefill", "preferred", "delay"]
AXES: tuple[Axis, ...] = ("slots", "prefill", "preferred", "delay")

_SLOT_FACTORS = (0.25, 0.5, 1, 2, 4)
_PREFILL_FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
_DELAYS = (0, 1_000, 10_000, 50_000)
_SMALLEST_PREFERRED = 4

MOST_AROUND = 15
"""Maximum of points around one point, all axes together: 4 + 5 + 2 + 4."""
ROUNDS = 2
LEADERS = 3
RUNS = 3
FIRST_RUNS = 2
MOST_REPEATS = 8
SEARCH_SHARE = 0.7
"""Of the time, for steps 1 and 2; the rest is reserved for step 3."""
MOST = FIRST_RUNS + ROUNDS * MOST_AROUND + MOST_REPEATS
"""Maximum of measurements in a search."""


class Search:
    """One search.

    most_at_once: maximum of requests in flight under the load, None if unbounded. measured: existing measurements by
    `run_key`. measure: makes another one and adds it to `measured`. seconds, most: the budget, in time and in
    measurements. spent: seconds since the start. say: takes a line of progress.
    """

    def __init__(
        self,
        default: Knobs,
        slo_p95_ms: float,
        most_at_once: int | None,
        measured: Mapping[str, Measurement],
        measure: Callable[[Knobs, int], None],
        seconds: float,
        most: int,
        spent: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self.default = default
        self._slo = slo_p95_ms
        self._most_at_once = most_at_once
        self._measured = measured
        self._measure = measure
        self._seconds = seconds
        self._most = most
        self._spent = spent
        self._say = say
        self._made = 0
        self._longest = 0.0
        # In the order of their first measurement.
        self._runs: dict[Knobs, list[Measurement]] = {}

    @property
    def points(self) -> list[Point]:
        """The measured points."""
        return [Point(knobs, runs) for knobs, runs in self._runs.items()]

    @property
    def noise(self) -> Noise:
        """The noise so far."""
        return measured_noise(self.points)

    def run(self) -> None:
        """Search until there is nothing left to measure or no time."""
        present = self.default
        self._take(present)
        for _ in range(ROUNDS):
            began = present
            for axis in AXES:
                if math.isinf(self.noise.throughput):
                    self._take(present, runs=FIRST_RUNS)
                present = self._along(axis, present)
            if present == began:
                break
        self._repeat_leaders()

    def _along(self, axis: Axis, present: Knobs) -> Knobs:
        """Measure the points of an axis; return the best."""
        tried = [present, *around(present, axis, self._most_at_once)]
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
        """Measure a point until it has that many runs, within this share of the budget; return whether it has."""
        have = self._runs.get(knobs, [])
        while len(have) < runs and not Point(knobs, have).failure:
            key = run_key(knobs, len(have) + 1)
            if key not in self._measured:
                # A measurement begins only if one as long as the longest so far fits.
                in_time = self._spent() + self._longest < share * self._seconds
                if not (in_time and self._made < share * self._most):
                    return False
                self._make(knobs, len(have) + 1)
            have.append(self._measured[key])
            self._runs[knobs] = have
        return len(have) >= runs

    def _make(self, knobs: Knobs, run: int) -> None:
        self._made += 1
        of_all = f"measurement {self._made} of at most {min(MOST, self._most)}"
        self._say(f"{of_all}: {knobs.describe()}{f', run {run}' if run > 1 else ''}")
        began = self._spent()
        self._measure(knobs, run)
        self._longest = max(self._longest, self._spent() - began)
        made = Point(knobs, [self._measured[run_key(knobs, run)]])
        self._say(f"  {made.failure or f'{made.tokens_per_second:,.1f} tokens/s, p95 {made.p95_ms:,.0f} ms'}")


def around(knobs: Knobs, axis: Axis, most_at_once: int | None) -> list[Knobs]:
    """Return the points of one axis through `knobs`, without itself.

    most_at_once: maximum of requests in flight; more slots can't be filled and aren't tried.
    """
    batcher = knobs.batcher
    points: list[Knobs] = []
    if axis == "slots":
        low, high = _bounds("slots")
        most = high if most_at_once is None else min(most_at_once, high)
        points = [_with_slots(knobs, max(low, min(int(knobs.slots * factor), most))) for factor in _SLOT_FACTORS]
    elif axis == "prefill":
        low, high = _bounds("prefill_tokens")
        tokens = [max(low, min(int(knobs.prefill_tokens * factor), high)) for factor in _PREFILL_FACTORS]
        points = [replace(knobs, prefill_tokens=count) for count in tokens]
    elif batcher is not None and axis == "preferred":
        # Full batches only, which is Triton's default, and the doubles of 4 up to a full batch.
        doubles = [_SMALLEST_PREFERRED << power for power in range(knobs.slots.bit_length())]
        up_to_full = (*[size for size in doubles if size < knobs.slots], knobs.slots)
        points = [replace(knobs, batcher=replace(batcher, preferred=one)) for one in ((knobs.slots,), up_to_full)]
    elif batcher is not None:
        points = [replace(knobs, batcher=replace(batcher, delay_microseconds=delay)) for delay in _DELAYS]
    return [point for point in dict.fromkeys(points) if point != knobs]


def resized(preferred: tuple[int, ...], slots: int, new_slots: int) -> tuple[int, ...]:
    """Return preferred sizes for another number of slots, which is the largest batch.

    Larger sizes are dropped. Where a full batch was preferred, the new full one is, with the doubles below it.
    """
    kept = [size for size in preferred if size < new_slots and size != slots]
    if slots in preferred:
        while kept and 2 * kept[-1] < new_slots:
            kept.append(2 * kept[-1])
        kept.append(new_slots)
    return tuple(kept) or (new_slots,)


def _with_slots(knobs: Knobs, slots: int) -> Knobs:
    batcher = knobs.batcher
    if batcher is not None:
        batcher = Batcher(batcher.delay_microseconds, resized(batcher.preferred, knobs.slots, slots))
    return replace(knobs, slots=slots, batcher=batcher)


def _bounds(setting: str) -> tuple[int, int]:
    bound = BOUNDS[setting]
    assert isinstance(bound, Integer)
    return bound.low, bound.high


def best(points: Sequence[Point], slo_p95_ms: float, noise: Noise, present: Knobs) -> Point | None:
    """Return the best working point, None if there is none. present: kept unless another one is better.

    A difference within the noise is none, so each criterion keeps every point within the noise of its best: points
    that meet the bound; the highest throughput; the lowest p95; the fewest changes from the present settings. If none
    meets the bound, the lowest p95 decides and the throughput doesn't count.
    """
    left = [point for point in points if not point.failure]
    if not left:
        return None
    if meeting := [point for point in left if point.meets(slo_p95_ms)]:
        highest = max(point.tokens_per_second for point in meeting)
        left = [point for point in meeting if point.tokens_per_second >= highest * (1 - noise.throughput)]
    lowest = min(point.p95_ms for point in left)
    left = [point for point in left if point.p95_ms <= lowest * (1 + noise.p95)]
    return min(left, key=lambda point: (point.knobs.changes(present), -point.tokens_per_second))


def recommended(points: Sequence[Point], slo_p95_ms: float, noise: Noise, default: Knobs) -> Point | None:
    """Return the point to recommend, None if none meets the bound; one measured once only if no repeated one does."""
    for pool in ([point for point in points if len(point.runs) > 1], points):
        found = best(pool, slo_p95_ms, noise, default)
        if found is not None and found.meets(slo_p95_ms):
            return found
    return None


def lowest_latency(points: Sequence[Point]) -> Point | None:
    """Return the working point with the lowest measured p95; None if none works."""
    return min((point for point in points if not point.failure), key=lambda point: point.p95_ms, default=None)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front of throughput and p95 as measured, regardless of the noise."""
    working = [point for point in points if not point.failure]
    return [point for point in working if not any(_beats(other, point) for other in working)]


def shortlist(points: Sequence[Point], slo_p95_ms: float, noise: Noise, present: Knobs, count: int) -> list[Point]:
    """Return the best `count` points, each the best of those that remain."""
    left = list(points)
    chosen: list[Point] = []
    while len(chosen) < count and (found := best(left, slo_p95_ms, noise, present)) is not None:
        chosen.append(found)
        left.remove(found)
    return chosen


def _beats(one: Point, other: Point) -> bool:
    mine, theirs = (one.tokens_per_second, -one.p95_ms), (other.tokens_per_second, -other.p95_ms)
    return all(a >= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs
