"""The recommended point has the highest throughput within the bound; differences within the noise don't count."""

from __future__ import annotations

import math

import pytest
from unit.tuning import DEFAULT, measurement, point

from perf.tune.points import Noise, Point, best, pareto, recommended, shortlist

NONE, SOME = Noise(0.0, 0.0), Noise(0.1, 0.1)
ONCE, REPEATED = point(900, 50, slots=16), point(100, 500, runs=2)
SLOW = [point(300, 1001), point(200, 900)]


def test_the_front_has_the_points_that_no_other_one_beats() -> None:
    front = [point(100, 900), point(100, 900, slots=16), point(80, 500), point(20, 100)]
    beaten = [point(80, 501), point(79, 500), point(19, 900), point(1000, 1, errors=3)]
    assert pareto([*beaten, *front]) == front


@pytest.mark.parametrize(
    ("default", "other", "bound", "noise", "chosen"),
    [
        pytest.param(point(100, 10), point(200, 1000, 16), 1000, NONE, "other", id="highest throughput"),
        pytest.param(point(200, 1000), point(300, 1001, 64), 1000, NONE, "default", id="beyond the bound"),
        pytest.param(*SLOW, 800, NONE, None, id="both beyond the bound"),
        pytest.param(point(100, 500), point(109, 490, 16), 1000, SOME, "default", id="a gain below the noise"),
        pytest.param(point(100, 500), point(109, 490, 16), 1000, NONE, "other", id="the same gain without noise"),
        pytest.param(point(100, 500), point(120, 500, 16), 1000, SOME, "other", id="a gain above the noise"),
        pytest.param(point(100, 500), point(98, 300, 16), 1000, SOME, "other", id="the lower latency"),
        pytest.param(REPEATED, ONCE, 1000, NONE, "default", id="measured once"),
        pytest.param(REPEATED, ONCE, 100, NONE, "other", id="only the one measured once is within the bound"),
        pytest.param(point(1000, 1, errors=3), point(10, 900, 16), 1000, NONE, "other", id="with errors"),
        pytest.param(point(1000, 1, errors=3), point(9, 9, 16, errors=1), 1000, NONE, None, id="only with errors"),
    ],
)
def test_the_highest_throughput_within_the_bound_and_beyond_the_noise_is_recommended(
    default: Point, other: Point, bound: float, noise: Noise, chosen: str | None
) -> None:
    expected = {"default": default, "other": other, None: None}[chosen]
    assert recommended([other, default], bound, noise, DEFAULT) is expected
    assert recommended([default, other], bound, noise, DEFAULT) is expected


def test_of_three_points_the_fastest_within_the_bound_is_recommended() -> None:
    too_slow, fast, quick = point(300, 1001, 64), point(200, 1000, 16), point(100, 10)
    assert recommended([quick, too_slow, fast], 1000, NONE, DEFAULT) is fast


def test_with_unknown_noise_a_default_within_the_bound_stays() -> None:
    default, other = point(100, 500), point(900, 50, 16)
    noise = Noise.of([default, other])
    assert math.isinf(noise.throughput)
    assert recommended([default, other], 1000, noise, DEFAULT) is default
    assert recommended([default, other], 100, noise, DEFAULT) is other


def test_the_best_point_has_no_errors_and_without_one_within_the_bound_the_lowest_latency() -> None:
    failed, whole = point(1000, 1, errors=3), point(10, 900)
    assert "3 of 20 requests failed: refused" in failed.failure
    assert best([failed], 1000, NONE, DEFAULT) is None
    assert best([failed, whole], 1000, NONE, DEFAULT) is whole
    late = [point(300, 5000), point(100, 3000, 8)]
    assert best(late, 1000, SOME, DEFAULT) is late[1]


def test_the_shortlist_is_ordered_and_has_no_failed_points() -> None:
    first, second, third = point(300, 900), point(200, 900, 8), point(100, 2000, 4)
    points = [third, point(900, 1, 2, errors=1), second, first]
    assert shortlist(points, 1000, NONE, DEFAULT, 2) == [first, second]
    assert shortlist(points, 1000, NONE, DEFAULT, 9) == [first, second, third]


def test_a_points_figures_combine_all_its_runs() -> None:
    both = Point(DEFAULT, [measurement(100, 1000), measurement(50, 4000)])
    # 2000 tokens in 10 + 20 seconds; four of the 40 requests took 1 or 4 seconds, the others half of that.
    assert both.tokens_per_second == pytest.approx(2000 / 30)
    assert (both.p95_ms, both.latency_ms["max"]) == (2000, 4000)


def test_the_noise_is_the_largest_distance_between_runs_of_one_point() -> None:
    calm = Point(DEFAULT, [measurement(100, 1000), measurement(102, 1000)])
    wild = Point(point(1, 1, 8).knobs, [measurement(90, 1000), measurement(110, 1500), measurement(100, 2000)])
    noise = Noise.of([calm, wild, point(1, 1, 4)])
    assert noise.throughput == pytest.approx(0.2)
    assert noise.p95 == pytest.approx(1000 / 1500)
