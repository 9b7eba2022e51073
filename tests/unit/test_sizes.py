"""How many requests fit into the time."""

from __future__ import annotations

import pytest

from perf.bench.measure import Pace, choose


def pace(wave_s: float, concurrency: int = 32) -> Pace:
    """Return a pace at which a wave of 200 tokens takes `wave_s`: a fifth for the prompts, the rest in proportion."""
    fixed, per_token = 0.2 * wave_s, 0.8 * wave_s / 200
    return Pace(concurrency, fixed + 4 * per_token, fixed + 20 * per_token)


def test_the_pace_of_short_requests_predicts_long_ones() -> None:
    assert pace(100.0).wave_seconds() == pytest.approx(100.0)
    assert pace(100.0).wave_seconds(400) == pytest.approx(180.0)
    assert Pace(32, 2.0, 1.5).wave_seconds(200) == 2.0, "longer requests are never predicted to be faster"


@pytest.mark.parametrize(
    ("seconds", "requests", "fits"),
    # Of a slow server the minimum is chosen all the same, and reported not to fit.
    [(10_000, 96, True), (400, 96, True), (399, 64, True), (201, 32, True), (199, 32, False), (1, 32, False)],
)
def test_the_warm_up_and_whole_waves_fit_into_the_time(seconds: float, requests: int, fits: bool) -> None:
    size = choose(seconds, pace(99.999))
    assert (size.requests, size.warmup, size.fits) == (requests, 32, fits)
    assert size.predicted_s == pytest.approx(99.999 * (requests + 32) / 32)


@pytest.mark.parametrize(("concurrency", "least"), [(1, 8), (3, 8), (24, 32), (32, 32), (128, 32)])
@pytest.mark.parametrize("seconds", [0.5, 50, 123, 5000])
def test_between_the_minimum_and_three_waves_are_measured(concurrency: int, least: int, seconds: float) -> None:
    size = choose(seconds, pace(10.0, concurrency), least)
    assert max(least, concurrency) <= size.requests <= 3 * max(least, concurrency)
    assert size.warmup == concurrency
