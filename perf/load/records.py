"""What happened to one request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Record:
    """One request's times, in seconds since the run's start, and its counts.

    scheduled: when it was to be sent; in a closed loop when its user was free. sent: None if it never was.
    first_token: of a stream. last_token: of a stream its last token, else the whole answer.
    token_times: of a stream, when each event with a token in it came; one event may hold several tokens.
    prompt_tokens: None where the server doesn't say. output_tokens: as the server counts them; 0 where it didn't.
    error: what went wrong, in one line; "" if nothing did.
    """

    scheduled: float
    sent: float | None
    first_token: float | None
    last_token: float | None
    token_times: tuple[float, ...]
    prompt_tokens: int | None
    output_tokens: int
    error: str

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
