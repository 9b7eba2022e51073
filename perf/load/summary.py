"""Records in, the load's part of a measurement out.

- **The window** is from the first measured request's scheduled moment to the last measured answer, the server being
  idle before. Every rate is over this window: tokens per second are the output tokens of all answered requests over it,
  requests per second their number over it. perf_analyzer's figures are put over the same window elsewhere, so they can
  stand in one table. A run's ramp at either end lies inside, the same for all; more requests make it weigh less.
- **Latency** is counted from when a request was *scheduled*: in an open loop, time that it waited to be sent counts
  (otherwise a generator that falls behind would hide just the slowest moments).
- **Time to first token** likewise, to the first event with a token in it. **Inter-token latency** is a request's own
  mean: first to last token, over its tokens less one, which holds also where one event joins several tokens. The gaps
  between events are given beside it.
- **Goodput**: requests that met the SLO, over the window. Errors meet none.

Failed requests are counted, and are in no other figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from setting.results import percentiles

from load.records import Record


@dataclass(frozen=True)
class SLO:
    """What a user puts up with. inter_token_latency_s: the request's mean.

    A unary answer, which has no first token, must be whole when a stream that just meets both would be.
    """

    time_to_first_token_s: float
    inter_token_latency_s: float

    def met(self, record: Record) -> bool:
        """Say whether the request got what it was promised."""
        if record.error:
            return False
        if record.first_token is None:
            whole = self.time_to_first_token_s + self.inter_token_latency_s * (record.output_tokens - 1)
            return record.latency <= whole
        between = inter_token_latency(record)
        return record.first_token - record.scheduled <= self.time_to_first_token_s and (
            between is None or between <= self.inter_token_latency_s
        )


def inter_token_latency(record: Record) -> float | None:
    """Return the request's mean seconds between two tokens; None for unary answers and single tokens."""
    if record.first_token is None or record.last_token is None or record.output_tokens < 2:
        return None
    return (record.last_token - record.first_token) / (record.output_tokens - 1)


def summarize(records: Sequence[Record], slo: SLO | None) -> dict[str, object]:
    """Return counts, rates, percentiles in milliseconds and, with an SLO, goodput. Raises ValueError for no records."""
    if not records:
        raise ValueError("there are no records to summarize")
    answered = [record for record in records if not record.error]
    failed = Counter(record.error for record in records if record.error)
    summary: dict[str, object] = {"requests": len(records), "errors": sum(failed.values())}
    if failed:
        summary["error_messages"] = dict(failed.most_common(5))
    if not answered:
        return summary
    latencies = [record.latency for record in answered]
    began = min(record.scheduled for record in records)
    duration = max(record.scheduled + record.latency for record in answered) - began
    tokens = sum(record.output_tokens for record in answered)
    summary |= {
        "duration_s": round(duration, 4),
        "output_tokens": tokens,
        "requests_per_second": round(len(answered) / duration, 4),
        "tokens_per_second": round(tokens / duration, 2),
        # Little's law: the mean number of requests that were waiting or being answered.
        "mean_in_flight": round(sum(latencies) / duration, 3),
        "latency_ms": percentiles(latencies),
        **_streamed(answered),
    }
    if slo is not None:
        good = sum(slo.met(record) for record in answered)
        summary["goodput"] = {
            "slo": asdict(slo),
            "requests_per_second": round(good / duration, 4),
            "share": round(good / len(records), 4),
        }
    summary["latencies_s"] = [round(latency, 4) for latency in latencies]
    return summary


def _streamed(answered: Sequence[Record]) -> dict[str, object]:
    firsts = [record.first_token - record.scheduled for record in answered if record.first_token is not None]
    between = [value for record in answered if (value := inter_token_latency(record)) is not None]
    gaps = [later - earlier for record in answered for earlier, later in pairwise(record.token_times)]
    named = {"time_to_first_token_ms": firsts, "inter_token_latency_ms": between, "gap_between_events_ms": gaps}
    return {name: percentiles(values) for name, values in named.items() if values}
