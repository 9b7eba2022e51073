"""What happened to one request, and which of its tokens fall into a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from perf.setting.window import Window

TIME_OVER = "the run's time was over"
"""In the errors of those that weren't answered for want of time: the server may be at work on them still."""


@dataclass(frozen=True)
class Record:
    """One request's times, in seconds since the run's start, and its counts.

    scheduled: when it was to be sent; in a closed loop when its user was free, which is when the user's answer before
    had come. sent: None if it never was. ended: when all was over, whether well or not.
    first_token: of a stream. last_token: of a stream its last token, else the whole answer.
    token_times: of a stream, when each event with a token in it came; one event may hold several tokens.
    prompt_tokens: None where the server doesn't say. output_tokens: as the server counts them; 0 where it didn't.
    error: what went wrong, in one line; "" if nothing did.
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
        """Whether the run's time was over before its answer came."""
        return TIME_OVER in self.error

    def tokens_in(self, window: Window) -> float:
        """Return how many of its tokens came in the window, the window's end excluded.

        A stream's tokens came with its events, as many with each: how they are joined isn't known of every server. The
        tokens of an answer in one piece all count when it is whole.
        """
        if not self.token_times:
            return float(self.output_tokens) if window.begin <= self.ended < window.end else 0.0
        inside = sum(window.begin <= moment < window.end for moment in self.token_times)
        return self.output_tokens * inside / len(self.token_times)

    @property
    def latency(self) -> float:
        """Seconds from when it was *scheduled* to its last token, so that waiting to be sent counts too.

        Raises ValueError where there is none.
        """
        if self.last_token is None:
            raise ValueError(f"a request without an answer has no latency: {self.error}")
        return self.last_token - self.scheduled

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Record:
        """Return what `to_json` has made."""
        return cls(**{**fields, "token_times": tuple(fields["token_times"])})
