"""What leaves the engine of a sequence: chunks of its text, its result, and the sink that takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable


@dataclass(frozen=True)
class Completion:
    """The result of a sequence that ran to its end.

    finish_reason: stop (end token, stop token or stop string) or length. stop_reason: the stop string, or the id of the
    stop token; else empty. choice: of the request's completions, from 0.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    stop_reason: str = ""
    choice: int = 0


Result = Completion | RequestError

FAILURE = GenerationError("decoding failed; the server's log has the reason")


def finish_reason(result: Result) -> str:
    """Return how a sequence finished, as metrics and the request log name it."""
    if isinstance(result, Completion):
        return result.finish_reason
    if isinstance(result, Cancelled):
        return "cancelled"
    if isinstance(result, Unavailable):
        return "unavailable"
    return "invalid" if isinstance(result, InvalidRequest) else "error"


@dataclass(frozen=True)
class Chunk:
    """A part of a sequence's text, with the number of tokens since the previous chunk. choice: as in `Completion`."""

    text: str
    num_tokens: int
    choice: int = 0


Event = Chunk | Result
"""An event of a sequence for its response sink: a chunk if it streams, and at the end its result."""


class ResponseSink(Protocol):
    """The way back to the client that sent a request; hashable by identity."""

    def send(self, events: list[Event]) -> None:
        """Send the events since the last call, in order."""

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request. A round trip to Triton: may block for a while."""


class DiscardingSink:
    """A sink for internal sequences, such as readiness trials."""

    def send(self, events: list[Event]) -> None:
        """Discard the events."""

    def is_cancelled(self) -> bool:
        """Return False."""
        return False
