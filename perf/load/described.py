"""A load in a result's file."""

from __future__ import annotations

from perf.load.arrivals import Closed, Poisson


def described(
    mix: str, arrivals: Closed | Poisson, requests: int, warmup: int, prompt_tokens: int, mean_output_tokens: float
) -> dict[str, object]:
    """Return a measurement's "load". requests: measured, after `warmup` others; lengths in tokens."""
    closed = isinstance(arrivals, Closed)
    return {
        "mix": mix,
        "arrivals": "closed" if closed else "poisson",
        "concurrency": arrivals.concurrency if isinstance(arrivals, Closed) else None,
        "rate_per_second": arrivals.rate if isinstance(arrivals, Poisson) else None,
        "requests": requests,
        "warmup_requests": warmup,
        "prompt_tokens": prompt_tokens,
        "mean_output_tokens": mean_output_tokens,
    }
