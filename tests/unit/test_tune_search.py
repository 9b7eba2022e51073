"""The search: one axis at a time, no measurement twice, within its budget, and resumable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from unit.tuning import DEFAULT, measurement

from perf.tune.points import Batcher, Knobs, Measurement, run_key
from perf.tune.search import AXES, FIRST_RUNS, MOST, MOST_AROUND, MOST_REPEATS, RUNS, Search, around, resized

Figures = Callable[[Knobs], tuple[float, float]]


class _Bench:
    """A fake of the servers: figures by formula, each measurement a second of its own clock."""

    def __init__(self, figures: Figures, seconds: float = 1e9, most: int = MOST) -> None:
        self.figures = figures
        self.measured: dict[str, Measurement] = {}
        self.made: list[tuple[Knobs, int]] = []
        self.lines: list[str] = []
        self.clock = 0.0
        self.seconds, self.most = seconds, most

    def search(self, default: Knobs = DEFAULT, most_at_once: int | None = None, slo: float = 1000) -> Search:
        search = Search(
            default,
            slo,
            most_at_once,
            self.measured,
            self._measure,
            self.seconds,
            self.most,
            spent=lambda: self.clock,
            say=self.lines.append,
        )
        search.run()
        return search

    def _measure(self, knobs: Knobs, run: int) -> None:
        self.clock += 1
        self.made.append((knobs, run))
        self.measured[run_key(knobs, run)] = measurement(*self.figures(knobs))

    @property
    def first_runs(self) -> list[Knobs]:
        return [knobs for knobs, run in self.made if run == 1]


def _flat(knobs: Knobs) -> tuple[float, float]:
    return 100.0, 500.0


def _best_at_64_slots_and_128_prefill(knobs: Knobs) -> tuple[float, float]:
    return 100.0 - abs(knobs.slots - 64) / 2 - abs(knobs.prefill_tokens - 128) / 100, 500.0


def test_the_default_is_measured_twice_and_then_each_axis_in_turn() -> None:
    bench = _Bench(_flat)
    bench.search()
    assert bench.made[:FIRST_RUNS] == [(DEFAULT, 1), (DEFAULT, 2)]
    after = [point for axis in AXES for point in around(DEFAULT, axis, None)]
    assert bench.first_runs == [DEFAULT, *after]


def test_the_search_ends_after_one_round_without_a_better_point() -> None:
    bench = _Bench(_flat)
    bench.search()
    assert (
        len(bench.first_runs)
        == len(set(bench.first_runs))
        == 1 + sum(len(around(DEFAULT, axis, None)) for axis in AXES)
    )


def test_each_axis_and_round_starts_from_the_best_point_so_far() -> None:
    bench = _Bench(_best_at_64_slots_and_128_prefill)
    search = bench.search()
    fastest = max(search.points, key=lambda point: point.tokens_per_second).knobs
    assert (fastest.slots, fastest.prefill_tokens) == (64, 128)
    # Beyond the first round's reach: four times the slots that it ended with.
    assert 256 in {knobs.slots for knobs in bench.first_runs}
    assert any("slots 64" in line and "takes the lead" in line for line in bench.lines)


def test_no_measurement_is_made_twice() -> None:
    bench = _Bench(_best_at_64_slots_and_128_prefill)
    bench.search()
    assert len(bench.made) == len(set(bench.made)) <= MOST


def test_the_leaders_and_the_default_are_measured_again() -> None:
    bench = _Bench(_best_at_64_slots_and_128_prefill)
    runs = {point.knobs: len(point.runs) for point in bench.search().points}
    best = max(runs, key=lambda knobs: _best_at_64_slots_and_128_prefill(knobs)[0])
    assert runs[DEFAULT] == runs[best] == RUNS
    assert sum(count > 1 for count in runs.values()) <= 2 + MOST_REPEATS


def test_a_lucky_measurement_is_repeated_and_counts_as_noise() -> None:
    lucky = replace(DEFAULT, prefill_tokens=64)
    seen: set[Knobs] = set()

    def once_fast(knobs: Knobs) -> tuple[float, float]:
        first = knobs not in seen
        seen.add(knobs)
        return (200.0 if first and knobs == lucky else 100.0), 500.0

    search = _Bench(once_fast).search()
    (found,) = [point for point in search.points if point.knobs == lucky]
    assert len(found.runs) > 1
    assert search.noise.throughput > 0.3


def test_the_search_keeps_to_its_time_and_reserves_some_for_repeats() -> None:
    bench = _Bench(_best_at_64_slots_and_128_prefill, seconds=11.0)
    bench.search()
    assert bench.clock <= 11.0
    assert len(bench.made) >= 9
    repeats = [run for _, run in bench.made[FIRST_RUNS:] if run > 1]
    assert len(repeats) >= 2


def test_without_time_nothing_is_measured() -> None:
    bench = _Bench(_flat, seconds=0.0)
    assert bench.search().points == []


def test_the_number_of_measurements_is_bounded() -> None:
    for most in (1, 2, 5):
        bench = _Bench(_flat, most=most)
        bench.search()
        assert len(bench.made) == most


def test_a_resumed_search_makes_only_missing_measurements() -> None:
    whole = _Bench(_best_at_64_slots_and_128_prefill)
    expected = whole.search()
    cut = _Bench(_best_at_64_slots_and_128_prefill, most=7)
    cut.search()
    resumed = _Bench(_best_at_64_slots_and_128_prefill)
    resumed.measured |= cut.measured
    found = resumed.search()
    assert {point.knobs for point in found.points} >= {point.knobs for point in expected.points}
    assert not set(resumed.made) & set(cut.made)


def test_a_point_that_the_server_refuses_is_not_tried_again() -> None:
    bench = _Bench(_flat)
    refused = replace(DEFAULT, prefill_tokens=64)
    bench.measured[run_key(refused, 1)] = {"not_run": "does not fit"}
    search = bench.search()
    (found,) = [point for point in search.points if point.knobs == refused]
    assert found.failure == "does not fit"
    assert refused not in {knobs for knobs, _ in bench.made}


def test_the_search_works_from_a_default_that_does_not_start() -> None:
    bench = _Bench(_flat)
    bench.measured[run_key(DEFAULT, 1)] = {"not_run": "does not fit"}
    search = bench.search()
    assert any(len(point.runs) == RUNS for point in search.points if point.knobs != DEFAULT)


def test_the_load_bounds_the_slots_that_are_tried() -> None:
    bench = _Bench(_flat)
    bench.search(most_at_once=48)
    assert {knobs.slots for knobs in bench.first_runs} == {8, 16, 32, 48}
    assert all(knobs.batcher is None or max(knobs.batcher.preferred) <= knobs.slots for knobs in bench.first_runs)


def test_a_config_without_a_batcher_has_two_axes() -> None:
    bench = _Bench(_flat)
    bench.search(default=Knobs(None, 1, 512))
    assert {knobs.batcher for knobs in bench.first_runs} == {None}
    assert {knobs.slots for knobs in bench.first_runs} == {1, 2, 4}


def test_every_value_is_within_the_engines_bounds() -> None:
    lowest = Knobs(Batcher(0, (1,)), 1, 1)
    highest = Knobs(Batcher(0, (1024,)), 1024, 1 << 20)
    for knobs in (lowest, highest):
        for point in (point for axis in AXES for point in around(knobs, axis, None)):
            assert 1 <= point.slots <= 1024
            assert 1 <= point.prefill_tokens <= 1 << 20


def test_the_axes_have_at_most_the_stated_number_of_points() -> None:
    for knobs in (DEFAULT, Knobs(Batcher(7, (3,)), 33, 500)):
        assert sum(len(around(knobs, axis, None)) for axis in AXES) <= MOST_AROUND


def test_preferred_sizes_follow_the_slots() -> None:
    assert resized((4, 8, 16, 32), 32, 8) == (4, 8)
    assert resized((4, 8, 16, 32), 32, 128) == (4, 8, 16, 32, 64, 128)
    assert resized((4, 8, 16, 32), 32, 48) == (4, 8, 16, 32, 48)
    assert resized((32,), 32, 128) == (128,)
    assert resized((4,), 32, 128) == (4,)
    assert resized((16,), 32, 8) == (8,)
