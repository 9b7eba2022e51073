"""What happened to each request of a load, and the window in which the load was steady.

A closed loop of 32 sends 32 requests at once and then one per answer until none are left. Two parts of that are not a
load of 32:

- **The beginning.** The first 32 arrive at an idle server; with a server that takes one at a time, they see a shorter
  queue than all later ones. They are the warm-up.
- **The end.** Once the last request is sent, every answer leaves a place empty. With mixed lengths the longest requests
  then decode alone, for up to a request's whole duration. The fewer requests a run has, the larger this tail.

The steady-state window therefore starts when the first request after the warm-up is sent, which is when an answer has
arrived, and ends at the first answer after the last request was sent; in between, 32 are always in flight. Both ends
lie at an answer (of answers that arrive in batches, at the first of a batch), so the window is not a batch too long or
too short. What counts is the tokens *generated* in it. Where a batch starts when the previous one has ended, those are
the tokens of the answers in the window, its end excluded; with continuous batching they are not, because answers
include tokens generated before the window and miss those of requests in flight at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from perf.load.arrivals import Closed, Poisson

TIME_OVER = "the run's time was over"
"""In the errors of requests without an answer in time: the server may still be computing them."""


@dataclass(frozen=True)
class Window:
    """begin, end: seconds, on the clock of the times it was computed from."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


def steady_state(sent: Sequence[float], answered: Sequence[float], warmup: int) -> Window:
    """Return the window of a closed loop in which its concurrency holds, without the first `warmup` requests.

    sent, answered: of each request, in any order. Raises ValueError unless a request is left after the warm-up.
    """
    if not 0 <= warmup < len(sent):
        raise ValueError(f"warmup is {warmup}, must be 0 … {len(sent) - 1}: fewer than the requests")
    last = max(sent)
    return Window(sorted(sent)[warmup], min(moment for moment in answered if moment > last))


@dataclass(frozen=True)
class Record:
    """One request's times, in seconds since the run's start, and its counts.

    scheduled: when it was due; in a closed loop when its user was free, which is when the user's previous answer
    arrived. sent: None if it never was. ended: when it succeeded or failed. first_token: of a stream. last_token: of a
    stream its last token, else the whole answer. token_times: of a stream, the arrival of each event with a token; an
    event may hold several tokens. prompt_tokens: None where the server does not count them. output_tokens: as the
    server counts them, else 0. error: what went wrong, in one line; "" for none.
    """

    scheduled: float
    sent: float | None
    first_token: float | None
    last_token: float | None
    ended: float
    token_times: tuple[float, ...]
    prompt_tokens: int | None
    output_tokens: int
    error: str

    @property
    def out_of_time(self) -> bool:
        """Whether the run ended before its answer arrived."""
        return TIME_OVER in self.error

    def tokens_in(self, window: Window) -> float:
        """Return how many of its tokens arrived in the window, the window's end excluded.

        The tokens of a stream are spread evenly over its events, as not every server says how many an event holds. The
        tokens of a unary answer all count when it is complete.
        """
        if not self.token_times:
            return float(self.output_tokens) if window.begin <= self.ended < window.end else 0.0
        inside = sum(window.begin <= moment < window.end for moment in self.token_times)
        return self.output_tokens * inside / len(self.token_times)

    @property
    def latency(self) -> float:
        """Seconds from when it was *scheduled* to its last token, so that time before sending counts too.

        Raises ValueError without an answer.
        """
        if self.last_token is None:
            raise ValueError(f"a request without an answer has no latency: {self.error}")
        return self.last_token - self.scheduled

    def to_json(self) -> dict[str, Any]:
        """Return its fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """Return the record that `to_json` wrote."""
        return cls(**{**fields, "token_times": tuple(fields["token_times"])})


@dataclass(frozen=True)
class Run:
    """records: of every request, in order; the first `warmup` are not measured. Iteration and length: the measured."""

    arrivals: Closed | Poisson
    records: tuple[Record, ...]
    warmup: int

    def __iter__(self) -> Iterator[Record]:
        return iter(self.measured)

    def __len__(self) -> int:
        return len(self.measured)

    @property
    def measured(self) -> tuple[Record, ...]:
        """The requests after the warm-up."""
        return self.records[self.warmup :]

    @property
    def answered(self) -> list[Record]:
        """Those without an error, the warm-up's included."""
        return [record for record in self.records if not record.error]

    @property
    def whole(self) -> Window:
        """From the first request's scheduled time to the last answer, warm-up included.

        Raises ValueError without an answer.
        """
        return span(self.records)


def span(records: Sequence[Record]) -> Window:
    """Return the time from the first scheduled request to the last answer. Raises ValueError without an answer."""
    ends = [record.last_token for record in records if not record.error and record.last_token is not None]
    if not ends:
        raise ValueError(f"none of {len(records)} requests was answered")
    return Window(min(record.scheduled for record in records), max(ends))
