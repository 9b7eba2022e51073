"""A run in, the load's part of a measurement out; `perf.report` chooses which percentiles the tables show.

- **Throughput** (`duration_s`, `output_tokens`, the rates) is over the steady-state window (`load.records`), and the
  tokens that arrived in it count. Behind unary answers that includes tokens generated before the window and misses
  about as many at its end. Requests per second are tokens per second over the load's mean length.
- **Latencies** are of every measured request, those answered after the window too, from when its user was free.
- **TTFT** likewise, to the first event with a token in it; a stream without such an event has its latency. **ITL** is a
  request's own mean: first to last token, over its tokens less one, which holds also where one event joins several
  tokens.
- **Hit rate** is the share of prompt tokens that the server's prefix cache had, **drafted share** that of output tokens
  that were accepted from drafts, where the server counts them.

Failed requests are counted, the warm-up's too; no other figure includes them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from perf.load.records import Record, Run

PERCENTILES = (50, 95, 99)


def inter_token_latency(record: Record) -> float | None:
    """Return the request's mean seconds between two tokens; None for unary answers and single tokens."""
    if record.first_token is None or record.last_token is None or record.output_tokens < 2:
        return None
    return (record.last_token - record.first_token) / (record.output_tokens - 1)


def summarize(run: Run) -> dict[str, Any]:
    """Return counts, rates and percentiles in milliseconds; only counts if no measured request was answered."""
    failed = Counter(record.error for record in run.records if record.error)
    summary: dict[str, Any] = {"requests": len(run.measured), "errors": failed.total()}
    if failed:
        summary["error_messages"] = dict(failed.most_common(5))
    answered = [record for record in run.measured if not record.error]
    if not answered:
        return summary
    if (window := run.steady) is not None:
        every = [record for record in run.records if not record.error]
        # A fraction where an event of several tokens lies at the window's edge.
        rate = sum(record.tokens_in(window) for record in every) / window.seconds
        mean_length = sum(record.output_tokens for record in every) / len(every)
        summary |= {
            "duration_s": round(window.seconds, 4),
            "output_tokens": round(rate * window.seconds),
            "requests_per_second": round(rate / mean_length, 4),
            "tokens_per_second": round(rate, 2),
        }
    ttfts = [record.first_token - record.scheduled for record in answered if record.first_token is not None]
    itls = [value for record in answered if (value := inter_token_latency(record)) is not None]
    named = {
        "latency_ms": [record.latency for record in answered],
        "time_to_first_token_ms": ttfts,
        "inter_token_latency_ms": itls,
    }
    summary |= {name: percentiles(values) for name, values in named.items() if values}
    cached = [record.cached_tokens for record in answered if record.cached_tokens is not None]
    if cached:
        summary["hit_rate"] = round(sum(cached) / sum(record.prompt_tokens or 0 for record in answered), 4)
    drafted = [record for record in answered if record.accepted_tokens is not None]
    if drafted:
        accepted = sum(record.accepted_tokens or 0 for record in drafted)
        summary["accepted_tokens"] = accepted
        summary["rejected_tokens"] = sum(record.rejected_tokens or 0 for record in drafted)
        summary["drafted_share"] = round(accepted / sum(record.output_tokens for record in answered), 4)
    return summary


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p95, p99 and max in milliseconds; by nearest rank, so each is a value that was measured."""
    ordered = sorted(seconds)
    ranked = {f"p{share}": ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] for share in PERCENTILES}
    every = {"mean": sum(ordered) / len(ordered), **ranked, "max": ordered[-1]}
    return {name: round(1e3 * value, 3) for name, value in every.items()}
