"""A run in, the load's part of a measurement out.

- **Throughput** is over a window (`load.throughput` says which, and why): `duration_s`, `output_tokens` and the rates.
  `whole_run` has a closed loop's plain figures beside it, with everything that was sent, warm-up included.
- **Latencies** are of every measured request, those answered after the window too: leaving them out would leave out the
  longest. They are counted from when a request was *scheduled*: in an open loop, time that it waited to be sent counts
  (otherwise a generator that falls behind would hide just the slowest moments).
- **Time to first token** likewise, to the first event with a token in it. **Inter-token latency** is a request's own
  mean: first to last token, over its tokens less one, which holds also where one event joins several tokens. The gaps
  between events are given beside it.
- **Goodput**: the share of the measured requests that met the SLO (errors meet none), and requests per second times the
  share of the answered ones that did.

Failed requests are counted, the warm-up's too, because they change the load of all others; they are in no other figure.
`unanswered` are those of them that the run had no time for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from perf.load.arrivals import Closed
from perf.load.records import Record
from perf.load.run import Run
from perf.load.throughput import throughput, whole
from perf.setting.results import percentiles


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


def summarize(run: Run, slo: SLO | None) -> dict[str, object]:
    """Return counts, rates, percentiles in milliseconds and, with an SLO, goodput. Raises ValueError for no records.

    Only counts if no measured request was answered.
    """
    if not run.measured:
        raise ValueError("there are no records to summarize")
    answered = [record for record in run.measured if not record.error]
    failed = Counter(record.error for record in run.records if record.error)
    summary: dict[str, object] = {"requests": len(run.measured), "errors": failed.total()}
    if failed:
        summary["error_messages"] = dict(failed.most_common(5))
        summary["unanswered"] = sum(record.out_of_time for record in run.records)
    if not answered:
        return summary
    done, latencies = throughput(run), [record.latency for record in answered]
    summary |= done.to_json()
    if isinstance(run.arrivals, Closed):
        summary["whole_run"] = {"requests": len(run.answered), **whole(run).to_json()}
    underway = sum(
        max(0.0, min(record.scheduled + record.latency, done.window.end) - max(record.scheduled, done.window.begin))
        for record in run.answered
    )
    # The mean number of requests that were waiting or being answered.
    summary["mean_in_flight"] = round(underway / done.window.seconds, 3)
    summary |= {"latency_ms": percentiles(latencies), **_streamed(answered)}
    if slo is not None:
        good = sum(slo.met(record) for record in answered)
        summary["goodput"] = {
            "slo": asdict(slo),
            "requests_per_second": round(done.requests_per_second * good / len(answered), 4),
            "share": round(good / len(run.measured), 4),
        }
    summary["latencies_s"] = [round(latency, 4) for latency in latencies]
    return summary


def _streamed(answered: Sequence[Record]) -> dict[str, object]:
    firsts = [record.first_token - record.scheduled for record in answered if record.first_token is not None]
    between = [value for record in answered if (value := inter_token_latency(record)) is not None]
    gaps = [later - earlier for record in answered for earlier, later in pairwise(record.token_times)]
    named = {"time_to_first_token_ms": firsts, "inter_token_latency_ms": between, "gap_between_events_ms": gaps}
    return {name: percentiles(values) for name, values in named.items() if values}
