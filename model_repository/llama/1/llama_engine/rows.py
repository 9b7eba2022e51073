"""A row: one request on its way through the engine, and what it comes to.

Knows what belongs to one request alone. Where it sits, and when it is computed, is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable
from llama_engine.text.bad_words import BadWords
from llama_engine.text.stop_checker import StopChecker


@dataclass(frozen=True)
class Completion:
    """What a row came to. finish_reason: stop (end token or stop word) or length."""

    text: str
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


Outcome = Completion | RequestError

FAILURE = GenerationError("decoding failed; the server's log has the reason")


def reason(outcome: Outcome) -> str:
    """Return how a row ended, in the word that metrics and log have for it."""
    if isinstance(outcome, Completion):
        return outcome.finish_reason
    if isinstance(outcome, Cancelled):
        return "cancelled"
    if isinstance(outcome, Unavailable):
        return "unavailable"
    return "invalid" if isinstance(outcome, InvalidRequest) else "error"


@dataclass(frozen=True)
class Piece:
    """A part of a row's text, and the number of tokens that came since the part before."""

    text: str
    num_tokens: int


@dataclass(eq=False)
class Row:
    """One request in the engine.

    length: positions of the cache that hold its keys and values. outcome: None until it has ended. name: what the log
    calls its request, in one printable line.
    """

    request: GenerationRequest
    transcript: StopChecker
    banned: BadWords | None
    length: int = 0
    outcome: Outcome | None = None
    name: str = ""
    _pieces: int = 0
    _tokens_taken: int = 0

    @property
    def unread(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return max(len(self.request.prompt_tokens) - self.length, 0)

    def completion(self) -> Completion:
        """Return the whole text so far, and the counts."""
        request, transcript = self.request, self.transcript
        return Completion(
            text=transcript.text if request.exclude_input_in_output else request.prompt + transcript.text,
            finish_reason=transcript.finish_reason,
            num_input_tokens=len(request.prompt_tokens),
            num_output_tokens=transcript.num_tokens,
        )

    def take(self) -> Piece | None:
        """Return the text that has become certain since the last piece; None if there is none and more will come."""
        transcript = self.transcript
        if transcript.num_tokens == self._tokens_taken:
            return None
        text = transcript.next_delta()
        if not self._pieces and not self.request.exclude_input_in_output:
            text = self.request.prompt + text
        if not text and not transcript.finish_reason:
            return None
        piece = Piece(text, transcript.num_tokens - self._tokens_taken)
        self._pieces += 1
        self._tokens_taken = transcript.num_tokens
        return piece


def named(rows: Sequence[Row]) -> str:
    """Return what the log calls these rows: a row alone by its request, several by their number."""
    return f"request {rows[0].name}" if len(rows) == 1 and rows[0].name else f"{len(rows)} rows"


def failure(row: Row, exhausted: bool) -> GenerationError:
    """Return what the client of a row may know about why it failed. exhausted: it took all of the device's memory."""
    if exhausted:
        size = len(row.request.prompt_tokens)
        return GenerationError(f"the device's memory was exhausted by this request alone, of {size} prompt tokens")
    return FAILURE
