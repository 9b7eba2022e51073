"""The search of `make tune`, what it recommends, and what it writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest

from perf.load.summary import percentiles
from perf.tune.__main__ import conclusion, sections
from perf.tune.points import Knobs, Measurement, Noise, Point, pareto, recommended
from perf.tune.search import AXES, FIRST_RUNS, RUNS, Search, around, up_to

DEFAULT = Knobs(10_000, (4, 8, 16, 32), slots=32, prefill_tokens=512)
SMALL = replace(DEFAULT, prefill_tokens=64)
REFUSED: Measurement = {"not_run": "does not fit"}


def measurement(tokens_per_second: float, p95_ms: float, errors: int = 0) -> Measurement:
    """Return a measurement of 20 requests with these figures."""
    latencies = [p95_ms / 2e3] * 18 + [p95_ms / 1e3] * 2
    return {
        "requests": 20, "errors": errors, "error_messages": {"refused": errors} if errors else {},
        "output_tokens": 1000, "duration_s": 1000 / tokens_per_second, "tokens_per_second": tokens_per_second,
        "latency_ms": percentiles(latencies), "latencies_s": latencies,
    }  # fmt: skip


def point(tokens_per_second: float, p95_ms: float, slots: int = 32, runs: int = 1, errors: int = 0) -> Point:
    """Return a point with these slots, otherwise the default's knobs, and `runs` equal measurements."""
    return Point(replace(DEFAULT, slots=slots), [measurement(tokens_per_second, p95_ms, errors)] * runs)


NONE, SOME = Noise(0.0, 0.0), Noise(0.1, 0.1)
ONCE, REPEATED = point(900, 50, slots=16), point(100, 500, runs=2)


@pytest.mark.parametrize(
    ("default", "other", "bound", "noise", "chosen"),
    [
        pytest.param(point(100, 10), point(200, 1000, 16), 1000, NONE, "other", id="highest throughput"),
        pytest.param(point(200, 1000), point(300, 1001, 64), 1000, NONE, "default", id="beyond the bound"),
        pytest.param(point(300, 1001), point(200, 900, 16), 800, NONE, None, id="both beyond the bound"),
        pytest.param(point(100, 500), point(109, 490, 16), 1000, SOME, "default", id="a gain below the noise"),
        pytest.param(point(100, 500), point(109, 490, 16), 1000, NONE, "other", id="the same gain without noise"),
        pytest.param(point(100, 500), point(98, 300, 16), 1000, SOME, "other", id="the lower latency"),
        pytest.param(REPEATED, ONCE, 1000, NONE, "default", id="measured once"),
        pytest.param(REPEATED, ONCE, 100, NONE, "other", id="only the one measured once is within the bound"),
        pytest.param(point(1000, 1, errors=3), point(10, 900, 16), 1000, NONE, "other", id="with errors"),
        pytest.param(point(1000, 1, errors=3), point(9, 9, 16, errors=1), 1000, NONE, None, id="only with errors"),
        pytest.param(point(100, 500), ONCE, 1000, Noise.of([ONCE]), "default", id="noise unknown"),
    ],
)
def test_the_highest_throughput_within_the_bound_and_beyond_the_noise_is_recommended(
    default: Point, other: Point, bound: float, noise: Noise, chosen: str | None
) -> None:
    expected = {"default": default, "other": other, None: None}[chosen]
    assert recommended([other, default], bound, noise, DEFAULT) is expected
    assert recommended([default, other], bound, noise, DEFAULT) is expected


def test_the_front_has_the_points_that_no_other_one_beats() -> None:
    front = [point(100, 900), point(100, 900, slots=16), point(80, 500), point(20, 100)]
    beaten = [point(80, 501), point(79, 500), point(19, 900), point(1000, 1, errors=3)]
    assert pareto([*beaten, *front]) == front


def test_a_points_figures_combine_all_its_runs_and_the_noise_is_their_largest_distance() -> None:
    both = Point(DEFAULT, [measurement(100, 1000), measurement(50, 4000)])
    # 2000 tokens in 10 + 20 seconds; four of the 40 requests took 1 or 4 seconds, the others half of that.
    assert both.tokens_per_second == pytest.approx(2000 / 30)
    assert (both.p95_ms, both.latency_ms["max"]) == (2000, 4000)
    calm = Point(DEFAULT, [measurement(100, 1000), measurement(102, 1000)])
    wild = Point(SMALL, [measurement(90, 1000), measurement(110, 1500), measurement(100, 2000)])
    noise = Noise.of([calm, wild, point(1, 1, 4)])
    assert noise == pytest.approx((0.2, 1000 / 1500))


def _flat(knobs: Knobs) -> float:
    return 100.0


def _peak(knobs: Knobs) -> float:
    """The highest throughput is at 64 slots and 128 tokens of prefill."""
    return 100.0 - abs(knobs.slots - 64) / 2 - abs(knobs.prefill_tokens - 128) / 100


class _Bench:
    """A fake of the servers: throughput by formula, each measurement a second of its own clock."""

    def __init__(self, throughput: Callable[[Knobs], float], **measured: Measurement) -> None:
        self.throughput = throughput
        self.measured = dict(measured)
        self.made: list[tuple[Knobs, int]] = []
        self.lines: list[str] = []

    def search(self, default: Knobs = DEFAULT, most_at_once: int | None = None, seconds: float = 1e9) -> Search:
        budget: Any = SimpleNamespace(seconds=seconds, spent=0.0, say=self.lines.append)

        def measure(knobs: Knobs, run: int) -> None:
            self.made.append((knobs, run))
            self.measured[knobs.key(run)] = measurement(self.throughput(knobs), 500.0)
            budget.spent += 1.0

        search = Search(default, 1000, most_at_once, self.measured, measure, budget)
        search.run()
        assert len(self.made) == len(set(self.made))
        return search

    @property
    def first_runs(self) -> list[Knobs]:
        return [knobs for knobs, run in self.made if run == 1]


def _all_around(knobs: Knobs) -> list[Knobs]:
    return [point for axis in AXES for point in around(knobs, axis, None)]


def test_the_default_is_measured_twice_then_each_axis_in_turn_until_a_round_without_a_better_point() -> None:
    bench = _Bench(_flat)
    bench.search()
    assert bench.made[:FIRST_RUNS] == [(DEFAULT, 1), (DEFAULT, 2)]
    assert bench.first_runs == [DEFAULT, *_all_around(DEFAULT)]


def test_each_axis_and_round_starts_from_the_best_point_and_the_leaders_and_the_default_are_measured_again() -> None:
    bench = _Bench(_peak)
    runs = {point.knobs: len(point.runs) for point in bench.search().points}
    fastest = max(runs, key=_peak)
    assert (fastest.slots, fastest.prefill_tokens) == (64, 128)
    # Beyond the first round's reach: four times the slots that it ended with.
    assert 256 in {knobs.slots for knobs in bench.first_runs}
    assert any("slots 64" in line and "takes the lead" in line for line in bench.lines)
    assert runs[DEFAULT] == runs[fastest] == RUNS


def test_a_lucky_measurement_is_repeated_and_counts_as_noise() -> None:
    seen: set[Knobs] = set()

    def once_fast(knobs: Knobs) -> float:
        first = knobs not in seen
        seen.add(knobs)
        return 200.0 if first and knobs == SMALL else 100.0

    search = _Bench(once_fast).search()
    assert [len(point.runs) > 1 for point in search.points if point.knobs == SMALL] == [True]
    assert search.noise.throughput > 0.3


def test_the_search_keeps_to_its_time_and_reserves_some_for_repeats() -> None:
    bench = _Bench(_peak)
    bench.search(seconds=11.0)
    assert 9 <= len(bench.made) <= 11
    assert sum(run > 1 for _, run in bench.made[FIRST_RUNS:]) >= 2
    late = _Bench(_peak)
    late.search(seconds=0.0)
    assert late.made == []


def test_a_resumed_search_makes_only_missing_measurements() -> None:
    expected = _Bench(_peak).search()
    cut = _Bench(_peak)
    cut.search(seconds=7.0)
    resumed = _Bench(_peak, **cut.measured)
    found = resumed.search()
    assert {point.knobs for point in found.points} >= {point.knobs for point in expected.points}
    assert not set(resumed.made) & set(cut.made)


@pytest.mark.parametrize("refused", [SMALL, DEFAULT], ids=["a point", "the default"])
def test_a_point_that_the_server_refuses_is_not_tried_again_and_the_search_goes_on(refused: Knobs) -> None:
    bench = _Bench(_flat, **{refused.key(1): REFUSED})
    points = {point.knobs: point for point in bench.search().points}
    assert points[refused].failure == "does not fit"
    assert refused not in {knobs for knobs, _ in bench.made}
    assert RUNS in {len(point.runs) for knobs, point in points.items() if knobs != refused}


def test_the_load_bounds_the_slots_that_are_tried() -> None:
    bench = _Bench(_flat)
    bench.search(most_at_once=48)
    assert {knobs.slots for knobs in bench.first_runs} == {8, 16, 32, 48}
    assert all(max(knobs.preferred_batch_size) <= knobs.slots for knobs in bench.first_runs)


@pytest.mark.parametrize("knobs", [Knobs(0, (1,), 1, 1), Knobs(0, (1024,), 1024, 1 << 20)], ids=str)
def test_the_axes_stay_within_the_engines_bounds(knobs: Knobs) -> None:
    for point in _all_around(knobs):
        assert 1 <= point.slots <= 1024
        assert 1 <= point.prefill_tokens <= 1 << 20


def test_preferred_sizes_are_the_doubles_below_a_full_batch_and_the_full_one() -> None:
    assert [up_to(slots) for slots in (1, 4, 48, 64)] == [(1,), (4,), (4, 8, 16, 32, 48), (4, 8, 16, 32, 64)]


def test_the_result_has_every_point_and_the_recommendation() -> None:
    best, failed = point(300, 600, 64, runs=3), point(9, 9, 1024, errors=1)
    points = [point(100, 500, runs=2), best, point(400, 1600), failed]
    found = json.loads(json.dumps(sections(points, Noise.of(points), 1000, best, "the config"), allow_nan=False))
    assert [one["pareto"] for one in found["points"]] == [True, True, True, False]
    assert [one["repeats"] for one in found["points"]] == [2, 3, 1, 1]
    assert (found["points"][1]["tokens_per_second"], found["points"][1]["p95_ms"]) == (300.0, 600.0)
    assert found["points"][3]["failure"] == "1 of 20 requests failed: refused"
    settings = {**asdict(best.knobs), "preferred_batch_size": [4, 8, 16, 32]}
    assert found["recommended"] == {"settings": settings, "config": "the config"}
    # JSON has no infinity.
    assert sections([point(1, 1)], Noise.of([]), 1, None, None)["noise"] is None


@pytest.mark.parametrize(
    ("points", "said"),
    [
        ([point(100, 500)], "tokens/s at a p95 of 500 ms, measured 1 times; nothing was measured twice."),
        ([point(100, 500, runs=2), point(300, 600, 64, runs=2)], "slots 64, prefill 512: 300.0 tokens/s at a p95 of"),
        ([point(100, 1500, runs=2)], "no p95 is at most 1000 ms. The lowest: 100.0 tokens/s at a p95 of 1,500 ms"),
        ([Point(DEFAULT, [REFUSED])], "no point could be measured without errors"),
    ],
)
def test_the_conclusion_has_the_recommendation_or_why_there_is_none(points: list[Point], said: str) -> None:
    noise = Noise.of(points)
    assert said in conclusion(points, noise, 1000, recommended(points, 1000, noise, DEFAULT))
