"""A sequence: one request in the engine, from its arrival to its last chunk.

It has one status and one result, and neither is copied elsewhere. A request of several rows is several sequences that
share a response sink.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable
from llama_engine.text.bad_words import BadWords
from llama_engine.text.stop_checker import StopChecker


class Status(Enum):
    """Where a sequence is on its way."""

    WAITING = "waiting"
    """It has no slot yet."""
    PREFILL = "prefill"
    """It has a slot; its prompt is not, or only partly, in the KV cache."""
    DECODE = "decode"
    """It gets one token per step."""
    FINISHED = "finished"
    """It has its result."""


@dataclass(frozen=True)
class Completion:
    """The result of a sequence that ran to its end. finish_reason: stop (end token or stop string) or length."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


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
    """A part of a sequence's text, with the number of tokens since the previous chunk."""

    text: str
    num_tokens: int


Event = Chunk | Result
"""What a response sink receives of a sequence: chunks if it streams, and last its result."""


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


@dataclass(eq=False)
class Sequence:
    """One request in the engine.

    name: the request's id in the log, one printable line. stream: send chunks to the sink. stream_interval: tokens per
    chunk after the first one. deadline: latest time to get a slot. kv_slot: where its keys and values are cached, from
    prefill to its end. num_cached: positions there that hold them. Times are monotonic, in seconds; NaN until they are
    reached.
    """

    request: GenerationRequest
    stop_checker: StopChecker
    bad_words: BadWords | None = None
    sink: ResponseSink = field(default_factory=DiscardingSink)
    name: str = ""
    stream: bool = False
    deadline: float = math.inf
    stream_interval: int = 1
    status: Status = Status.WAITING
    result: Result | None = None
    kv_slot: int | None = None
    num_cached: int = 0
    arrived_at: float = field(default_factory=time.monotonic)
    admitted_at: float = math.nan
    first_token_at: float = math.nan
    finished_at: float = math.nan
    _num_chunked_tokens: int = 0
    _finishing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_tokens)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.stop_checker.num_tokens

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that are not in the KV cache yet."""
        return max(self.num_prompt_tokens - self.num_cached, 0)

    def admit(self) -> None:
        """Enter the engine: WAITING → PREFILL."""
        self.status = Status.PREFILL
        self.admitted_at = time.monotonic()

    def start_decoding(self) -> None:
        """Enter the batch: PREFILL → DECODE, unless a shutdown has finished it meanwhile."""
        with self._finishing:
            if self.status is Status.PREFILL:
                self.status = Status.DECODE

    def append(self, token: int, token_bytes: bytes) -> None:
        """Take the next token and its bytes; finish if it is the last one."""
        finished = self.stop_checker.add(token, token_bytes)
        if math.isnan(self.first_token_at):
            self.first_token_at = time.monotonic()
        if finished:
            self.finish(self.completion())
        elif self.bad_words is not None:
            self.bad_words.append(token_bytes)

    def finish(self, result: Result) -> None:
        """Set the result. An error replaces a completion; nothing replaces an error.

        Any thread may call it: a shutdown finishes sequences while a step that holds them hangs.
        """
        with self._finishing:
            if isinstance(self.result, RequestError) or (self.result is not None and isinstance(result, Completion)):
                return
            self.finished_at = time.monotonic()
            self.result = result
            self.status = Status.FINISHED

    def fail(self, exhausted: bool = False) -> None:
        """Finish with the error of a failed computation. exhausted: it took all of the device's memory by itself."""
        message = f"the device's memory was exhausted by this request alone, of {self.num_prompt_tokens} prompt tokens"
        self.finish(GenerationError(message) if exhausted else FAILURE)

    def next_chunk(self) -> Chunk | None:
        """Return the text that has become certain since the last chunk; None if none is due and more will come."""
        stop_checker = self.stop_checker
        pending = stop_checker.num_tokens - self._num_chunked_tokens
        # The first chunk has no interval to wait for: TTFT is what it would be without one.
        due = self.stream_interval if self._num_chunked_tokens and not stop_checker.finish_reason else 1
        if pending < due:
            return None
        text = stop_checker.next_delta()
        if not self._num_chunked_tokens and not self.request.exclude_input_in_output:
            text = self.request.prompt + text
        if not text and not stop_checker.finish_reason:
            return None
        chunk = Chunk(text, pending)
        self._num_chunked_tokens = stop_checker.num_tokens
        return chunk

    def completion(self) -> Completion:
        """Return the text so far, and the counts."""
        request, stop_checker = self.request, self.stop_checker
        return Completion(
            text=stop_checker.text if request.exclude_input_in_output else request.prompt + stop_checker.text,
            finish_reason=stop_checker.finish_reason,
            num_input_tokens=self.num_prompt_tokens,
            num_output_tokens=stop_checker.num_tokens,
        )


def names_of(sequences: Iterable[Sequence]) -> str:
    """Return how the log names these sequences: one by its request's id, several by their number."""
    names = [sequence.name for sequence in sequences]
    return f"request {names[0]}" if len(names) == 1 and names[0] else f"{len(names)} sequences"
