"""Points of a search with chosen figures."""

from __future__ import annotations

from dataclasses import replace

from perf.load.summary import percentiles
from perf.tune.points import Knobs, Measurement, Point

DEFAULT = Knobs(10_000, (4, 8, 16, 32), slots=32, prefill_tokens=512)


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
