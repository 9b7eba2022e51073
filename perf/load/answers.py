"""Answers, read while they come: when tokens came, how many there were, and whether the answer is whole.

Knows bodies, not connections: what isn't a 200 never gets here. An error in the answer is raised, never skipped.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from triton_llama.errors import ServerError
from triton_llama.sse import EventReader

from perf.load.target import Protocol


class AnswerError(Exception):
    """The answer is an error, or isn't whole, or isn't what the protocol says; `str()` is one line."""


class Answer(ABC):
    """One request's answer. Times are whatever the caller's clock says."""

    def __init__(self) -> None:
        self.token_times: list[float] = []
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.prompt_tokens: int | None = None
        self.output_tokens = 0

    @abstractmethod
    def feed(self, chunk: bytes, now: float) -> None:
        """Take in the next bytes of the body, which came `now`; raises AnswerError."""

    @abstractmethod
    def end(self, now: float) -> None:
        """Take note that the body is complete; raises AnswerError if the answer isn't."""


def answer_of(protocol: Protocol) -> Answer:
    """Return a reader for one answer."""
    match protocol:
        case "triton_generate":
            return _Unary("num_output_tokens", "num_input_tokens")
        case "fastapi":
            return _Unary("tokens", None)
        case "triton_stream":
            return _TritonPieces()
        case "openai_completions":
            return _Completions()


class _Unary(Answer):
    """One JSON object."""

    def __init__(self, output_count: str, prompt_count: str | None) -> None:
        super().__init__()
        self._names = (output_count, prompt_count)
        self._body = bytearray()

    def feed(self, chunk: bytes, now: float) -> None:
        self._body += chunk

    def end(self, now: float) -> None:
        fields = _object(bytes(self._body))
        _refuse_error(fields)
        output_count, prompt_count = self._names
        self.output_tokens = _count(fields, output_count)
        self.prompt_tokens = None if prompt_count is None else _count(fields, prompt_count)
        self.last_token = now


class _Events(Answer):
    """Server-sent events."""

    def __init__(self) -> None:
        super().__init__()
        self._events = EventReader()
        self._ended = False

    def feed(self, chunk: bytes, now: float) -> None:
        try:
            for data in self._events.feed(chunk):
                if data.strip() != b"[DONE]" and self._bears_token(data):
                    self._note(now)
        except ServerError as error:
            raise AnswerError(str(error)) from error

    def end(self, now: float) -> None:
        if not self._ended:
            raise AnswerError(f"the stream ended without a finish_reason, after {len(self.token_times)} events")
        if not self.token_times:
            # Tokens that are no text, such as special ones, may never be sent: they were there when the stream ended.
            self._note(now)

    @abstractmethod
    def _bears_token(self, data: bytes) -> bool:
        """Take in an event; say whether there is a token in it."""

    def _note(self, now: float) -> None:
        self.token_times.append(now)
        self.first_token = self.token_times[0]
        self.last_token = now


class _TritonPieces(_Events):
    """Our pieces: each says how many tokens it joins, the last one how long the prompt was."""

    def _bears_token(self, data: bytes) -> bool:
        fields = _object(data)
        _refuse_error(fields)
        tokens = _count(fields, "num_output_tokens")
        self.output_tokens += tokens
        if fields.get("finish_reason"):
            self._ended = True
            self.prompt_tokens = _count(fields, "num_input_tokens")
        return tokens > 0


class _Completions(_Events):
    """OpenAI's completion chunks. They don't say how many tokens they hold; `usage`, near the end, has the total."""

    def __init__(self) -> None:
        super().__init__()
        self._counted = False

    def end(self, now: float) -> None:
        super().end(now)
        if not self._counted:
            raise AnswerError("the stream ended without a usage: its tokens can't be counted")

    def _bears_token(self, data: bytes) -> bool:
        fields = _object(data)
        _refuse_error(fields)
        usage = fields.get("usage")
        if isinstance(usage, dict):
            self._counted = True
            self.output_tokens = _count(usage, "completion_tokens")
            self.prompt_tokens = _count(usage, "prompt_tokens")
        bears_token = False
        for choice in fields.get("choices", []):
            ends = choice.get("finish_reason") is not None
            self._ended = self._ended or ends
            # A chunk with no text has a token that isn't text yet; some servers send a last one that has none at all.
            bears_token = bears_token or bool(choice.get("text")) or not ends
        return bears_token


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError as error:
        raise AnswerError(f"the server sent what is not JSON: {data[:80]!r}") from error
    if not isinstance(fields, dict):
        raise AnswerError(f"the server sent {data[:80]!r}, must be a JSON object")
    return fields


def _refuse_error(fields: Mapping[str, Any]) -> None:
    if "error" in fields:
        raise AnswerError(f"the server answered with an error: {str(fields['error'])[:200]}")


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise AnswerError(f"the server's {name} is {str(value)[:80]}, must be an integer")
    return value
