"""The search: one axis at a time, no measurement twice, within its budget, and resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.tuning import DEFAULT, measurement

from perf.tune.points import Knobs, Measurement, Point
from perf.tune.search import AXES, FIRST_RUNS, MOST, MOST_AROUND, MOST_REPEATS, RUNS, Search, around, resized

SMALL = replace(DEFAULT, prefill_tokens=64)


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

    def search(
        self, default: Knobs = DEFAULT, most_at_once: int | None = None, seconds: float = 1e9, most: int = MOST
    ) -> Search:
        search = Search(
            default, 1000, most_at_once, self.measured, self._measure, seconds, most,
            spent=lambda: float(len(self.made)), say=self.lines.append,
        )  # fmt: skip
        search.run()
        return search

    def _measure(self, knobs: Knobs, run: int) -> None:
        self.made.append((knobs, run))
        self.measured[knobs.key(run)] = measurement(self.throughput(knobs), 500.0)

    @property
    def first_runs(self) -> list[Knobs]:
        return [knobs for knobs, run in self.made if run == 1]


def _all_around(knobs: Knobs) -> list[Knobs]:
    return [point for axis in AXES for point in around(knobs, axis, None)]


def _of(search: Search, knobs: Knobs) -> Point:
    (found,) = [point for point in search.points if point.knobs == knobs]
    return found


def test_the_default_is_measured_twice_then_each_axis_in_turn_until_a_round_without_a_better_point() -> None:
    bench = _Bench(_flat)
    bench.search()
    assert bench.made[:FIRST_RUNS] == [(DEFAULT, 1), (DEFAULT, 2)]
    assert bench.first_runs == [DEFAULT, *_all_around(DEFAULT)]
    assert len(bench.made) == len(set(bench.made))


def test_each_axis_and_round_starts_from_the_best_point_so_far_and_measures_nothing_twice() -> None:
    bench = _Bench(_peak)
    fastest = max(bench.search().points, key=lambda point: point.tokens_per_second).knobs
    assert (fastest.slots, fastest.prefill_tokens) == (64, 128)
    # Beyond the first round's reach: four times the slots that it ended with.
    assert 256 in {knobs.slots for knobs in bench.first_runs}
    assert any("slots 64" in line and "takes the lead" in line for line in bench.lines)
    assert len(bench.made) == len(set(bench.made)) <= MOST


def test_the_leaders_and_the_default_are_measured_again() -> None:
    runs = {point.knobs: len(point.runs) for point in _Bench(_peak).search().points}
    assert runs[DEFAULT] == runs[max(runs, key=_peak)] == RUNS
    assert sum(count > 1 for count in runs.values()) <= 2 + MOST_REPEATS


def test_a_lucky_measurement_is_repeated_and_counts_as_noise() -> None:
    seen: set[Knobs] = set()

    def once_fast(knobs: Knobs) -> float:
        first = knobs not in seen
        seen.add(knobs)
        return 200.0 if first and knobs == SMALL else 100.0

    search = _Bench(once_fast).search()
    assert len(_of(search, SMALL).runs) > 1
    assert search.noise.throughput > 0.3


def test_the_search_keeps_to_its_time_and_reserves_some_for_repeats() -> None:
    bench = _Bench(_peak)
    bench.search(seconds=11.0)
    assert 9 <= len(bench.made) <= 11
    assert sum(run > 1 for _, run in bench.made[FIRST_RUNS:]) >= 2
    assert _Bench(_flat).search(seconds=0.0).points == []


@pytest.mark.parametrize("most", [1, 2, 5])
def test_the_number_of_measurements_is_bounded(most: int) -> None:
    bench = _Bench(_flat)
    bench.search(most=most)
    assert len(bench.made) == most


def test_a_resumed_search_makes_only_missing_measurements() -> None:
    expected = _Bench(_peak).search()
    cut = _Bench(_peak)
    cut.search(most=7)
    resumed = _Bench(_peak, **cut.measured)
    found = resumed.search()
    assert {point.knobs for point in found.points} >= {point.knobs for point in expected.points}
    assert not set(resumed.made) & set(cut.made)


def test_a_point_that_the_server_refuses_is_not_tried_again() -> None:
    bench = _Bench(_flat, **{SMALL.key(1): {"not_run": "does not fit"}})
    assert _of(bench.search(), SMALL).failure == "does not fit"
    assert SMALL not in {knobs for knobs, _ in bench.made}


def test_the_search_works_from_a_default_that_does_not_start() -> None:
    search = _Bench(_flat, **{DEFAULT.key(1): {"not_run": "does not fit"}}).search()
    assert any(len(point.runs) == RUNS for point in search.points if point.knobs != DEFAULT)


def test_the_load_bounds_the_slots_that_are_tried() -> None:
    bench = _Bench(_flat)
    bench.search(most_at_once=48)
    assert {knobs.slots for knobs in bench.first_runs} == {8, 16, 32, 48}
    assert all(max(knobs.preferred_batch_size or ()) <= knobs.slots for knobs in bench.first_runs)


def test_a_config_without_a_batcher_has_two_axes() -> None:
    bench = _Bench(_flat)
    bench.search(default=Knobs(None, None, 1, 512))
    assert {knobs.preferred_batch_size for knobs in bench.first_runs} == {None}
    assert {knobs.slots for knobs in bench.first_runs} == {1, 2, 4}


@pytest.mark.parametrize("knobs", [Knobs(0, (1,), 1, 1), Knobs(0, (1024,), 1024, 1 << 20)], ids=str)
def test_every_value_is_within_the_engines_bounds(knobs: Knobs) -> None:
    for point in _all_around(knobs):
        assert 1 <= point.slots <= 1024
        assert 1 <= point.prefill_tokens <= 1 << 20


@pytest.mark.parametrize("knobs", [DEFAULT, Knobs(7, (3,), 33, 500)], ids=str)
def test_the_axes_have_at_most_the_stated_number_of_points(knobs: Knobs) -> None:
    assert len(_all_around(knobs)) <= MOST_AROUND


@pytest.mark.parametrize(
    ("preferred", "before", "after", "expected"),
    [
        ((4, 8, 16, 32), 32, 8, (4, 8)),
        ((4, 8, 16, 32), 32, 128, (4, 8, 16, 32, 64, 128)),
        ((4, 8, 16, 32), 32, 48, (4, 8, 16, 32, 48)),
        ((32,), 32, 128, (128,)),
        ((4,), 32, 128, (4,)),
        ((16,), 32, 8, (8,)),
    ],
)
def test_preferred_sizes_follow_the_slots(
    preferred: tuple[int, ...], before: int, after: int, expected: tuple[int, ...]
) -> None:
    assert resized(preferred, before, after) == expected
