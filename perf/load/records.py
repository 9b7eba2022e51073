"""What happened to each request of a load, and the window in which the load was steady.

A closed loop of 32 sends 32 requests at once and then one per answer until none are left. The first 32 arrive at an
idle server: they are the warm-up. Once the last request is sent, every answer leaves a place empty. The steady-state
window therefore starts when the first request after the warm-up is sent, and ends at the first answer after the last
request was sent; in between, 32 are always in flight. Both ends lie at an answer, so the window is not a batch too long
or too short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

TIME_OVER = "the run's time was over"
"""Error of requests that have no response when the run's time is over; the server may still be computing them."""


class Window(NamedTuple):
    """begin, end: seconds, on the clock of the times it was computed from."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last second of the steady state."""
        return self.end - self.begin


@dataclass
class Record:
    """One request's times, in seconds since the run's start, and its counts.

    scheduled: when its user was free, which is when the user's previous answer arrived. sent: None if it never was.
    ended: when it succeeded or failed. token_times: of a stream, the arrival of each event with a token; an event may
    hold several tokens. Where no event had one, the answer's end, if it came. prompt_tokens: None where the server does
    not count them. output_tokens: as the server counts them, else 0. error: what went wrong, in one line; "" for none.
    cached_tokens: tokens of the prompt that its prefix cache had; None where the server does not say. accepted_tokens,
    rejected_tokens: of its drafts; None where the server does not say. text: of a stream, with arguments of tool calls.
    turn: the request's. answer: its JSON objects, of a stream its events', if the target keeps them.
    """

    scheduled: float
    sent: float | None = None
    ended: float = 0.0
    token_times: Sequence[float] = ()
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str = ""
    cached_tokens: int | None = None
    accepted_tokens: int | None = None
    rejected_tokens: int | None = None
    text: str = ""
    turn: int = 1
    answer: Sequence[Mapping[str, Any]] = ()

    @property
    def first_token(self) -> float | None:
        """When the first token of a stream arrived."""
        return self.token_times[0] if self.token_times else None

    @property
    def last_token(self) -> float | None:
        """When the last token of a stream arrived, else the whole answer."""
        if self.token_times:
            return self.token_times[-1]
        return None if self.error else self.ended

    @property
    def latency(self) -> float:
        """Seconds from when it was *scheduled* to its last token, so that time before sending counts too.

        Raises ValueError without an answer.
        """
        if self.last_token is None:
            raise ValueError(f"a request without an answer has no latency: {self.error}")
        return self.last_token - self.scheduled

    def tokens_in(self, window: Window) -> float:
        """Return how many of its tokens arrived in the window, the window's end excluded.

        The tokens of a stream are spread evenly over its events, as not every server says how many an event holds. The
        tokens of a unary answer all count when it is complete.
        """
        arrivals = self.token_times or (self.ended,)
        return self.output_tokens * sum(window.begin <= moment < window.end for moment in arrivals) / len(arrivals)


@dataclass(frozen=True)
class Run:
    """A closed loop. records: of every request, in order; the first `warmup`, whole chats, are not measured."""

    concurrency: int
    records: tuple[Record, ...]
    warmup: int

    @property
    def measured(self) -> tuple[Record, ...]:
        """The requests after the warm-up."""
        return self.records[self.warmup :]

    @property
    def steady(self) -> Window | None:
        """The window in which the concurrency holds; None of a single wave.

        A user is free for other requests when its chat ends; most requests are chats of a single turn.
        """
        firsts = [number for number, record in enumerate(self.records) if record.turn == 1]
        lasts = [*(number - 1 for number in firsts[1:]), len(self.records) - 1]
        sent = [chat for chat in zip(firsts, lasts, strict=True) if self.records[chat[0]].sent is not None]
        if len(sent) <= self.concurrency:
            return None
        # Scheduled, not sent: the window starts at the very answer that made the first one's place free.
        begun = [self.records[first].scheduled for first, _ in sent]
        ended = [self.records[last].ended for _, last in sent]
        warmup = sum(first < self.warmup for first in firsts)
        last = max(begun)
        return Window(sorted(begun)[warmup], min(moment for moment in ended if moment > last))
