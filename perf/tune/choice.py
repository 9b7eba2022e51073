"""Which point is best under the bound, which ones nothing beats, and which ones should be measured again.

A difference that isn't larger than what two measurements of one point differ by is none. So the best point is found by
filters, each of which keeps everything that can't be told from its best:

1. points that work and whose p95 meets the bound;
2. the highest throughput;
3. among those, the lowest p95;
4. among those the point that is there already, if it is among them; else the one with the fewest changes from it.

Where nothing meets the bound, the lowest p95 comes first and the throughput doesn't count.
"""

from __future__ import annotations

from collections.abc import Sequence

from perf.tune.knobs import Knobs
from perf.tune.points import Noise, Point


def best(points: Sequence[Point], slo_p95_ms: float, noise: Noise, present: Knobs) -> Point | None:
    """Return the best of the points, None if none of them works. present: what is kept unless another one is better."""
    working = [point for point in points if not point.failure]
    if not working:
        return None
    meeting = [point for point in working if point.meets(slo_p95_ms)]
    if meeting:
        highest = max(point.tokens_per_second for point in meeting)
        left = [point for point in meeting if point.tokens_per_second >= highest * (1 - noise.throughput)]
    else:
        left = working
    lowest = min(point.p95_ms for point in left)
    left = [point for point in left if point.p95_ms <= lowest * (1 + noise.p95)]
    return min(left, key=lambda point: (point.knobs.changes(present), -point.tokens_per_second))


def recommended(points: Sequence[Point], slo_p95_ms: float, noise: Noise, default: Knobs) -> Point | None:
    """Return the point to recommend, None if none meets the bound.

    One that was measured more than once, unless only one that was measured once meets the bound.
    """
    for pool in ([point for point in points if len(point.runs) > 1], points):
        found = best(pool, slo_p95_ms, noise, default)
        if found is not None and found.meets(slo_p95_ms):
            return found
    return None


def lowest_latency(points: Sequence[Point]) -> Point | None:
    """Return the working point with the lowest p95 that was measured, noise or not; None if none works."""
    return min((point for point in points if not point.failure), key=lambda point: point.p95_ms, default=None)


def pareto(points: Sequence[Point]) -> list[Point]:
    """Return the working points that no other one beats: none has as much throughput at as low a p95, and one better.

    As measured: noise isn't looked at.
    """
    working = [point for point in points if not point.failure]
    return [point for point in working if not any(_beats(other, point) for other in working)]


def shortlist(points: Sequence[Point], slo_p95_ms: float, noise: Noise, present: Knobs, count: int) -> list[Point]:
    """Return the best `count` points, each the best of those that the ones before leave."""
    left = list(points)
    chosen: list[Point] = []
    while len(chosen) < count and (found := best(left, slo_p95_ms, noise, present)) is not None:
        chosen.append(found)
        left.remove(found)
    return chosen


def _beats(one: Point, other: Point) -> bool:
    mine, theirs = (one.tokens_per_second, -one.p95_ms), (other.tokens_per_second, -other.p95_ms)
    return all(a >= b for a, b in zip(mine, theirs, strict=True)) and mine != theirs
