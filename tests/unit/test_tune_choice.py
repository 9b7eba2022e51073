"""The recommended point has the highest throughput within the bound; differences within the noise don't count."""

from __future__ import annotations

import math

import pytest
from unit.tuning import DEFAULT, measurement, point, slots

from perf.tune.points import Noise, Point, measured_noise
from perf.tune.search import best, lowest_latency, pareto, recommended, shortlist

NONE = Noise(0.0, 0.0)
SOME = Noise(0.1, 0.1)


def test_the_front_has_the_points_that_no_other_one_beats() -> None:
    fast, balanced, quick = point(100, 900), point(80, 500), point(20, 100)
    beaten = [point(80, 501), point(79, 500), point(19, 900)]
    assert pareto([*beaten, fast, balanced, quick]) == [fast, balanced, quick]


def test_equal_points_are_both_on_the_front() -> None:
    twins = [point(100, 900, slots(8)), point(100, 900, slots(16))]
    assert pareto(twins) == twins


def test_a_point_with_errors_is_neither_on_the_front_nor_chosen() -> None:
    failed, whole = point(1000, 1, errors=3), point(10, 900)
    assert pareto([failed, whole]) == [whole]
    assert best([failed, whole], 1000, NONE, DEFAULT) is whole
    assert best([failed], 1000, NONE, DEFAULT) is None
    assert recommended([failed], 1000, NONE, DEFAULT) is None
    assert "3 of 20 requests failed: refused" in failed.failure


def test_the_highest_throughput_within_the_bound_is_recommended() -> None:
    too_slow, fast, quick = point(300, 1001, slots(64)), point(200, 1000, slots(16)), point(100, 10, DEFAULT)
    assert recommended([quick, too_slow, fast], 1000, NONE, DEFAULT) is fast


def test_without_a_point_within_the_bound_nothing_is_recommended() -> None:
    points = [point(300, 1001), point(200, 900)]
    assert recommended(points, 800, NONE, DEFAULT) is None
    lowest = lowest_latency(points)
    assert lowest is not None
    assert lowest.p95_ms == 900


def test_a_gain_below_the_noise_does_not_displace_the_default() -> None:
    default, other = point(100, 500), point(109, 490, slots(16))
    assert recommended([other, default], 1000, SOME, DEFAULT) is default
    assert recommended([other, default], 1000, NONE, DEFAULT) is other


def test_a_gain_above_the_noise_displaces_the_default() -> None:
    default, other = point(100, 500), point(120, 500, slots(16))
    assert recommended([default, other], 1000, SOME, DEFAULT) is other


def test_at_equal_throughput_the_lower_latency_is_recommended() -> None:
    default, other = point(100, 500), point(98, 300, slots(16))
    assert recommended([default, other], 1000, SOME, DEFAULT) is other


def test_with_unknown_noise_a_default_within_the_bound_stays() -> None:
    default, other = point(100, 500), point(900, 50, slots(16))
    noise = measured_noise([default, other])
    assert math.isinf(noise.throughput)
    assert recommended([default, other], 1000, noise, DEFAULT) is default
    assert recommended([default, other], 100, noise, DEFAULT) is other


def test_a_point_measured_once_is_recommended_only_if_no_repeated_one_meets_the_bound() -> None:
    lucky, repeated = point(900, 50, slots(16)), point(100, 500, runs=2)
    assert recommended([lucky, repeated], 1000, NONE, DEFAULT) is repeated
    assert recommended([lucky, repeated], 100, NONE, DEFAULT) is lucky


def test_without_a_point_within_the_bound_the_lowest_latency_is_best() -> None:
    default, other = point(300, 5000), point(100, 3000, slots(8))
    assert best([default, other], 1000, SOME, DEFAULT) is other


def test_the_shortlist_is_ordered_and_has_no_failed_points() -> None:
    first, second, third = point(300, 900), point(200, 900, slots(8)), point(100, 2000, slots(4))
    points = [third, point(900, 1, slots(2), errors=1), second, first]
    assert shortlist(points, 1000, NONE, DEFAULT, 2) == [first, second]
    assert shortlist(points, 1000, NONE, DEFAULT, 9) == [first, second, third]


def test_a_points_figures_combine_all_its_runs() -> None:
    both = Point(DEFAULT, [measurement(100, 1000), measurement(50, 4000)])
    # 2000 tokens in 10 + 20 seconds; four of the 40 requests took 1 or 4 seconds, the others half of that.
    assert both.tokens_per_second == pytest.approx(2000 / 30)
    assert both.p95_ms == 2000
    assert both.latency_ms["max"] == 4000


def test_the_noise_is_the_largest_distance_between_runs_of_one_point() -> None:
    calm = Point(DEFAULT, [measurement(100, 1000), measurement(102, 1000)])
    wild = Point(slots(8), [measurement(90, 1000), measurement(110, 1500), measurement(100, 2000)])
    noise = measured_noise([calm, wild, point(1, 1, slots(4))])
    assert noise.throughput == pytest.approx(0.2)
    assert noise.p95 == pytest.approx(1000 / 1500)
