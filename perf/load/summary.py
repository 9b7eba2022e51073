"""A run in, the load's part of a measurement out.

- **Throughput** (`duration_s`, `output_tokens`, the rates) is over a window, by the same rule for every server. In a
  closed loop it is the steady-state window (`load.records`), and the tokens that arrived in it count: exact for
  streams and for a server that runs batch after batch; with continuous batching behind unary answers it includes tokens
  generated before the window and misses about as many in flight at its end. Requests per second are tokens per second
  over the load's mean length, because the answers in the window are no measure of the work done in it. `whole_run` has
  the plain figures beside it, warm-up included; a single wave has no others. In an open loop the window is from the
  first measured request's scheduled time to the last measured answer: a server that falls behind takes longer.
- **Latencies** are of every measured request, those answered after the window too: leaving them out would leave out the
  longest. They start when a request was *scheduled*: in an open loop, time before sending counts (otherwise a generator
  that falls behind would hide exactly the slowest moments).
- **TTFT** likewise, to the first event with a token in it. **ITL** is a request's own mean: first to last token, over
  its tokens less one, which holds also where one event joins several tokens.
- **Goodput**: the share of the measured requests that met the SLO (errors meet none), and requests per second times the
  share of the answered ones that did.

Failed requests are counted, the warm-up's too, because they change the load of all others; no other figure includes
them. `unanswered` counts those of them that ran out of time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from perf.load.arrivals import Closed, Poisson
from perf.load.records import TIME_OVER, Record, Run, Window, span

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class SLO:
    """A service-level objective. inter_token_latency_s: the request's mean.

    A unary answer, which has no TTFT, must be complete when a stream that just meets both would be.
    """

    time_to_first_token_s: float
    inter_token_latency_s: float

    def met(self, record: Record) -> bool:
        """Return whether an answered request met it."""
        if record.first_token is None:
            complete = self.time_to_first_token_s + self.inter_token_latency_s * (record.output_tokens - 1)
            return record.latency <= complete
        itl = inter_token_latency(record)
        return record.first_token - record.scheduled <= self.time_to_first_token_s and (
            itl is None or itl <= self.inter_token_latency_s
        )


def inter_token_latency(record: Record) -> float | None:
    """Return the request's mean seconds between two tokens; None for unary answers and single tokens."""
    if record.first_token is None or record.last_token is None or record.output_tokens < 2:
        return None
    return (record.last_token - record.first_token) / (record.output_tokens - 1)


def summarize(run: Run, slo: SLO | None) -> dict[str, object]:
    """Return counts, rates, percentiles in milliseconds and, with an SLO, goodput.

    Only counts if no measured request was answered.
    """
    every = _answered(run.records)
    answered = _answered(run.measured)
    failed = Counter(record.error for record in run.records if record.error)
    summary: dict[str, object] = {"requests": len(run.measured), "errors": failed.total()}
    if failed:
        summary["error_messages"] = dict(failed.most_common(5))
        summary["unanswered"] = sum(TIME_OVER in record.error for record in run.records)
    if not answered:
        return summary
    closed, mean_tokens = isinstance(run.arrivals, Closed), _tokens(every) / len(every)
    if (steady := run.steady) is not None:
        window, tokens = steady, sum(record.tokens_in(steady) for record in every)
        requests = tokens / mean_tokens
    else:
        counted = every if closed else answered
        window = span(run.records if closed else run.measured)
        tokens, requests = _tokens(counted), float(len(counted))
    summary |= _rates(window, tokens, requests)
    if closed:
        summary["whole_run"] = {"requests": len(every), **_rates(run.whole, _tokens(every), len(every))}
    latencies = [record.latency for record in answered]
    summary |= {"latency_ms": percentiles(latencies), **_streamed(answered)}
    if slo is not None:
        good = sum(slo.met(record) for record in answered)
        summary["goodput"] = {
            "slo": asdict(slo),
            "requests_per_second": round(requests / window.seconds * good / len(answered), 4),
            "share": round(good / len(run.measured), 4),
        }
    summary["latencies_s"] = [round(latency, 4) for latency in latencies]
    return summary


def describe(
    mix: str, arrivals: Closed | Poisson, requests: int, warmup: int, prompt_tokens: int, mean_output_tokens: float
) -> dict[str, object]:
    """Return a measurement's "load". requests: measured, after `warmup` others; lengths in tokens."""
    return {
        "mix": mix,
        "arrivals": type(arrivals).__name__.lower(),
        "concurrency": arrivals.concurrency if isinstance(arrivals, Closed) else None,
        "rate_per_second": arrivals.rate if isinstance(arrivals, Poisson) else None,
        "requests": requests,
        "warmup_requests": warmup,
        "prompt_tokens": prompt_tokens,
        "mean_output_tokens": mean_output_tokens,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return mean, p50, p95, p99 and max in milliseconds; by nearest rank, so each is a value that was measured."""
    ordered = sorted(seconds)
    ranked = {f"p{share}": ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)] for share in PERCENTILES}
    every = {"mean": sum(ordered) / len(ordered), **ranked, "max": ordered[-1]}
    return {name: round(1e3 * value, 3) for name, value in every.items()}


def _rates(window: Window, tokens: float, requests: float) -> dict[str, object]:
    """tokens: a fraction where an event of several lies at the window's edge."""
    return {
        "duration_s": round(window.seconds, 4),
        "output_tokens": round(tokens),
        "requests_per_second": round(requests / window.seconds, 4),
        "tokens_per_second": round(tokens / window.seconds, 2),
    }


def _streamed(answered: Sequence[Record]) -> dict[str, object]:
    ttfts = [record.first_token - record.scheduled for record in answered if record.first_token is not None]
    itls = [value for record in answered if (value := inter_token_latency(record)) is not None]
    named = {"time_to_first_token_ms": ttfts, "inter_token_latency_ms": itls}
    return {name: percentiles(values) for name, values in named.items() if values}


def _answered(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if not record.error]


def _tokens(records: Sequence[Record]) -> int:
    return sum(record.output_tokens for record in records)
