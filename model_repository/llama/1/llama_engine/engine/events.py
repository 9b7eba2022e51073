"""A sequence's chunks and result, the sinks that receive them, and what a request's sequences share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable


@dataclass(frozen=True)
class Completion:
    """The result of a sequence that finished without an error.

    finish_reason: stop (end token, stop token or stop string) or length. stop_reason: the stop string, or the id of the
    stop token; else empty. choice: index among the completions of the prompt, from 0. embedding: that of the prompt, if
    the request is for one; it has no text.
    """

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int
    stop_reason: str = ""
    choice: int = 0
    embedding: tuple[float, ...] = field(default=(), repr=False)


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
    """A chunk of a stream: text of a sequence, and the number of tokens since the previous chunk.

    choice: see `Completion`. A chunk of a prefill's tokens is a `TokenChunk`.
    """

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
        """Return whether the client has cancelled the request or the final response has been sent.

        May block for a round trip to Triton.
        """


class DiscardingSink:
    """A sink for internal sequences, such as readiness probes."""

    def send(self, events: list[Event]) -> None:
        """Discard the events."""

    def is_cancelled(self) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True)
class RequestContext:
    """Properties of a request that all of its sequences share.

    sink: receives the events. name: the request's id in the log, one printable line. stream: whether the sink receives
    chunks besides results. deadline: time on the monotonic clock by which a sequence must have a slot.
    """

    sink: ResponseSink = field(default_factory=DiscardingSink)
    name: str = ""
    stream: bool = False
    deadline: float = math.inf
