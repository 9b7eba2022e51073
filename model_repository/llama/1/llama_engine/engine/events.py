"""The engine's output for a sequence: chunks of text, the result, and the sink that receives them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable


@dataclass(frozen=True)
class Completion:
    """The result of a sequence that finished without an error.

    finish_reason: stop (end token, stop token or stop string) or length. stop_reason: the stop string, or the id of the
    stop token; else empty. choice: index among the completions of the prompt, from 0.
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
    """Return a result's finish reason as in metrics and the request log, where errors have one, too."""
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
"""An event for a response sink: a chunk of a streaming sequence, or a sequence's result, always its last event."""


class ResponseSink(Protocol):
    """Receives the events of a request's sequences, normally to send them to the client. Hashed by identity."""

    def send(self, events: list[Event]) -> None:
        """Send the events since the previous call, in order."""

    def is_cancelled(self) -> bool:
        """Return whether the client has cancelled the request. Blocks for a round trip to Triton."""


class DiscardingSink:
    """A sink for internal sequences, such as readiness trials."""

    def send(self, events: list[Event]) -> None:
        """Discard the events."""

    def is_cancelled(self) -> bool:
        """Return False."""
        return False
