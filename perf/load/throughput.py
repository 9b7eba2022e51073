"""How much a server did in a run, and over which time: the same rule for every server, however long it was measured.

**In a closed loop** it is the window of full load (`setting.window` says why): from when the first request after the
warm-up could be sent, to the first answer after the last request was. The beginning at an idle server and the emptying
tail, which weigh more in a short run, are in no rate. What counts is the tokens that came in the window, whoever's they
are: of a stream by the times of its events; of a server that answers in one piece, by its answers. That is exact for a
server that runs batch after batch; of one whose rows are always underway it counts what was generated before the window
and leaves out what is underway at its end, which is about as much. Requests per second are tokens per second over the
load's mean length, because the answers in the window are no measure of what was done in it. The warm-up has to be at
least the concurrency, else the window begins while the server fills. `whole_run` has the plain figures beside it.

A single wave, in which every request is sent at once, has no such window: its figures are those of the whole run.

**In an open loop** it is from the first measured request's scheduled moment to the last measured answer, and what
counts is the measured requests' answers: a server that falls behind takes longer for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perf.load.arrivals import Closed
from perf.load.records import Record
from perf.load.run import Run, span
from perf.setting.window import Window, full_load


@dataclass(frozen=True)
class Throughput:
    """tokens: that came in the window; a fraction where an event of several lies at its edge."""

    window: Window
    tokens: float
    requests_per_second: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of the window."""
        return self.tokens / self.window.seconds

    def to_json(self) -> dict[str, object]:
        """Return it as a measurement has it."""
        return {
            "duration_s": round(self.window.seconds, 4),
            "output_tokens": round(self.tokens),
            "requests_per_second": round(self.requests_per_second, 4),
            "tokens_per_second": round(self.tokens_per_second, 2),
        }


def throughput(run: Run) -> Throughput:
    """Return what the run came to. Raises ValueError unless a measured request was answered."""
    if not isinstance(run.arrivals, Closed):
        return _over(span(run.measured), run.measured)
    sent = [record for record in run.records if record.sent is not None]
    if len(sent) <= run.arrivals.concurrency:
        return whole(run)
    # Scheduled, not sent: the window begins at the very answer that made the first one's place free.
    window = full_load([record.scheduled for record in sent], [record.ended for record in sent], run.warmup)
    tokens = sum(record.tokens_in(window) for record in run.answered)
    mean = _tokens(run.records) / len(run.answered)
    return Throughput(window, tokens, tokens / window.seconds / mean)


def whole(run: Run) -> Throughput:
    """Return the plain figures: all that was answered, warm-up included, over all the time. Raises as above."""
    return _over(run.whole, run.records)


def _over(window: Window, records: Sequence[Record]) -> Throughput:
    answered = sum(not record.error for record in records)
    return Throughput(window, _tokens(records), answered / window.seconds)


def _tokens(records: Sequence[Record]) -> int:
    return sum(record.output_tokens for record in records if not record.error)
