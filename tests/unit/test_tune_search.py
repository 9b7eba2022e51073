"""The search of `make tune`, what it recommends, and what it writes."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from perf.load.arrivals import Closed
from perf.load.summary import percentiles
from perf.tune.config import Subject, knobs_of, parsed
from perf.tune.findings import Findings, conclusion
from perf.tune.measuring import Demand
from perf.tune.points import Knobs, Measurement, Noise, Point, pareto, recommended, shortlist
from perf.tune.search import AXES, FIRST_RUNS, MOST, MOST_AROUND, MOST_REPEATS, RUNS, Search, around, resized

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
        pytest.param(point(100, 500), point(120, 500, 16), 1000, SOME, "other", id="a gain above the noise"),
        pytest.param(point(100, 500), point(98, 300, 16), 1000, SOME, "other", id="the lower latency"),
        pytest.param(REPEATED, ONCE, 1000, NONE, "default", id="measured once"),
        pytest.param(REPEATED, ONCE, 100, NONE, "other", id="only the one measured once is within the bound"),
        pytest.param(point(1000, 1, errors=3), point(10, 900, 16), 1000, NONE, "other", id="with errors"),
        pytest.param(point(1000, 1, errors=3), point(9, 9, 16, errors=1), 1000, NONE, None, id="only with errors"),
        pytest.param(point(100, 500), ONCE, 1000, Noise.of([ONCE]), "default", id="noise unknown"),
        pytest.param(point(100, 500), ONCE, 100, Noise.of([ONCE]), "other", id="noise unknown, beyond the bound"),
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


def test_the_shortlist_has_no_failed_points_and_those_beyond_the_bound_last_by_latency() -> None:
    first, second, third, fourth = point(300, 900), point(200, 900, 8), point(100, 2000, 4), point(400, 3000, 16)
    points = [fourth, third, point(900, 1, 2, errors=1), second, first]
    assert shortlist(points, 1000, NONE, DEFAULT, 2) == [first, second]
    assert shortlist(points, 1000, NONE, DEFAULT, 9) == [first, second, third, fourth]


def test_a_points_figures_combine_all_its_runs_and_the_noise_is_their_largest_distance() -> None:
    both = Point(DEFAULT, [measurement(100, 1000), measurement(50, 4000)])
    # 2000 tokens in 10 + 20 seconds; four of the 40 requests took 1 or 4 seconds, the others half of that.
    assert both.tokens_per_second == pytest.approx(2000 / 30)
    assert (both.p95_ms, both.latency_ms["max"]) == (2000, 4000)
    calm = Point(DEFAULT, [measurement(100, 1000), measurement(102, 1000)])
    wild = Point(SMALL, [measurement(90, 1000), measurement(110, 1500), measurement(100, 2000)])
    noise = Noise.of([calm, wild, point(1, 1, 4)])
    assert noise.throughput == pytest.approx(0.2)
    assert noise.p95 == pytest.approx(1000 / 1500)


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
        assert len(self.made) == len(set(self.made)) <= MOST
        return search

    def _measure(self, knobs: Knobs, run: int) -> None:
        self.made.append((knobs, run))
        self.measured[knobs.key(run)] = measurement(self.throughput(knobs), 500.0)

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
    assert sum(count > 1 for count in runs.values()) <= 2 + MOST_REPEATS


def test_a_lucky_measurement_is_repeated_and_counts_as_noise() -> None:
    seen: set[Knobs] = set()

    def once_fast(knobs: Knobs) -> float:
        first = knobs not in seen
        seen.add(knobs)
        return 200.0 if first and knobs == SMALL else 100.0

    search = _Bench(once_fast).search()
    assert [len(point.runs) > 1 for point in search.points if point.knobs == SMALL] == [True]
    assert search.noise.throughput > 0.3


@pytest.mark.parametrize(
    ("seconds", "most", "made"), [(11.0, MOST, (9, 11)), (0.0, MOST, (0, 0)), (1e9, 1, (1, 1)), (1e9, 5, (5, 5))]
)
def test_the_search_keeps_to_its_time_and_its_number_of_measurements(
    seconds: float, most: int, made: tuple[int, int]
) -> None:
    bench = _Bench(_peak)
    bench.search(seconds=seconds, most=most)
    assert made[0] <= len(bench.made) <= made[1]
    # Some of the time is reserved for repeats.
    assert most < MOST or not bench.made or sum(run > 1 for _, run in bench.made[FIRST_RUNS:]) >= 2


def test_a_resumed_search_makes_only_missing_measurements() -> None:
    expected = _Bench(_peak).search()
    cut = _Bench(_peak)
    cut.search(most=7)
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


def test_the_load_bounds_the_slots_that_are_tried_and_a_config_without_a_batcher_has_two_axes() -> None:
    bench = _Bench(_flat)
    bench.search(most_at_once=48)
    assert {knobs.slots for knobs in bench.first_runs} == {8, 16, 32, 48}
    assert all(max(knobs.preferred_batch_size or ()) <= knobs.slots for knobs in bench.first_runs)
    bench = _Bench(_flat)
    bench.search(default=Knobs(None, None, 1, 512))
    assert {(knobs.preferred_batch_size, knobs.slots) for knobs in bench.first_runs} == {
        (None, 1),
        (None, 2),
        (None, 4),
    }


@pytest.mark.parametrize(
    "knobs", [DEFAULT, Knobs(7, (3,), 33, 500), Knobs(0, (1,), 1, 1), Knobs(0, (1024,), 1024, 1 << 20)], ids=str
)
def test_the_axes_have_at_most_the_stated_number_of_points_all_within_the_engines_bounds(knobs: Knobs) -> None:
    assert len(_all_around(knobs)) <= MOST_AROUND
    for point in _all_around(knobs):
        assert 1 <= point.slots <= 1024
        assert 1 <= point.prefill_tokens <= 1 << 20


@pytest.mark.parametrize(
    ("preferred", "after", "expected"),
    [
        ((4, 8, 16, 32), 8, (4, 8)),
        ((4, 8, 16, 32), 128, (4, 8, 16, 32, 64, 128)),
        ((4, 8, 16, 32), 48, (4, 8, 16, 32, 48)),
        ((32,), 128, (128,)),
        ((4,), 128, (4,)),
        ((16,), 8, (8,)),
    ],
)
def test_preferred_sizes_follow_the_slots(preferred: tuple[int, ...], after: int, expected: tuple[int, ...]) -> None:
    assert resized(preferred, 32, after) == expected


def _findings(*points: Point, slo_p95_ms: float = 1000) -> Findings:
    demand = Demand("uniform", Closed(4), requests=8, warmup=2, output_tokens=10, timeout=60.0)
    return Findings(
        Subject.of("default", "anything", threads=1), None, demand, slo_p95_ms, "a device", points, Noise.of(points)
    )


def test_the_findings_have_every_point_and_the_recommendation_with_its_config() -> None:
    failed = point(9, 9, 1024, errors=1)
    findings = _findings(point(100, 500, runs=2), point(300, 600, 64, runs=3), point(400, 1600), failed)
    sections = json.loads(json.dumps(findings.sections(), allow_nan=False))
    default, best, late, broken = sections["points"]
    assert (default["repeats"], default["pareto"], default["meets_slo"]) == (2, True, True)
    assert best["key"] == "delay10000/preferred4-8-16-32/slots64/prefill512/run1"
    assert (best["tokens_per_second"], best["p95_ms"], best["repeats"]) == (300.0, 600.0, 3)
    assert (late["pareto"], late["meets_slo"]) == (True, False)
    assert (broken["tokens_per_second"], broken["pareto"], broken["meets_slo"]) == (None, False, False)
    chosen = replace(DEFAULT, slots=64)
    assert sections["recommended"]["settings"] == {**asdict(chosen), "preferred_batch_size": [4, 8, 16, 32]}
    assert sections["recommended"]["command"] == "make serve VARIANT=tuned"
    config = sections["recommended"]["config"]
    assert knobs_of(parsed(config)) == chosen
    assert "p95 of at most 1000 ms" in config.splitlines()[0]
    assert "# Without a kind: one instance per GPU" in config
    assert "Recommended: delay 10000 us, preferred 4 8 16 32, slots 64, prefill 512: 300.0" in conclusion(findings)
    assert "The present config: 100.0 tokens/s at a p95 of 500 ms" in conclusion(findings)


@pytest.mark.parametrize(
    ("findings", "said"),
    [
        (_findings(point(100, 500)), "Nothing was measured twice"),
        (_findings(point(100, 500)), "It was measured only once"),
        (
            _findings(Point(DEFAULT, [measurement(100, 500), measurement(120, 500)]), point(115, 500, 64, runs=2)),
            "Recommended: the present config: 109.1 tokens/s at a p95 of 500 ms. Nothing is better by more than the",
        ),
        (_findings(point(100, 500, runs=2), slo_p95_ms=400), "no point has a p95 of at most 400 ms"),
        (_findings(point(100, 500, runs=2), slo_p95_ms=400), "The lowest p95: 100.0 tokens/s at a p95 of 500 ms"),
        (_findings(Point(DEFAULT, [REFUSED])), "no point could be measured without errors"),
        (_findings(), "no point could be measured without errors"),
    ],
)
def test_the_conclusion_has_the_recommendation_or_why_there_is_none(findings: Findings, said: str) -> None:
    assert said in conclusion(findings)
    assert (findings.sections()["recommended"] is None) == ("Nothing is recommended" in conclusion(findings))
    # JSON has no infinity.
    assert (findings.sections()["noise"] is None) == math.isinf(findings.noise.throughput)
