"""Points of a search with chosen figures."""

from __future__ import annotations

from perf.load.summary import percentiles
from perf.tune.points import Batcher, Knobs, Measurement, Point

DEFAULT = Knobs(Batcher(10_000, (4, 8, 16, 32)), slots=32, prefill_tokens=512)


def measurement(tokens_per_second: float, p95_ms: float, errors: int = 0) -> Measurement:
    """Return a measurement of 20 requests with these figures."""
    latencies = [p95_ms / 2e3] * 18 + [p95_ms / 1e3] * 2
    failed = {"error_messages": {"refused": errors}} if errors else {}
    return {
        "requests": 20,
        "errors": errors,
        "output_tokens": 1000,
        "duration_s": 1000 / tokens_per_second,
        "tokens_per_second": tokens_per_second,
        "latency_ms": percentiles(latencies),
        "latencies_s": latencies,
        **failed,
    }


def point(tokens_per_second: float, p95_ms: float, knobs: Knobs = DEFAULT, runs: int = 1, errors: int = 0) -> Point:
    """Return a point with `runs` equal measurements."""
    return Point(knobs, [measurement(tokens_per_second, p95_ms, errors)] * runs)


def slots(count: int) -> Knobs:
    """Return the default with other slots."""
    return Knobs(DEFAULT.batcher, count, DEFAULT.prefill_tokens)
