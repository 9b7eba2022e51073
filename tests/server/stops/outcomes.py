"""How a request that the server had accepted has ended, as its client knows it."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from http.client import HTTPException, HTTPResponse
from typing import Any

from triton_llama import LlamaConnectionError, LlamaTimeoutError, RejectedInputError, TritonLlamaError


class Outcome(StrEnum):
    """Every outcome but `SILENT` and `LOST` tells the client what became of its request."""

    COMPLETE = "complete"
    """The whole text."""
    REFUSED = "refused"
    """An error that names the reason."""
    CUT = "cut off"
    """The connection closed within a response, which the client's protocol reports."""
    CANCELLED = "cancelled"
    """By the client itself."""
    SILENT = "silent"
    """Neither a byte nor an end, because the server's network is gone; permitted only to clients that read nothing."""
    LOST = "lost"
    """A connection that closed without a response, silence, or another text than without a stop."""


@dataclass(frozen=True)
class End:
    """An outcome, and the error or the text behind it in a line."""

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True)
class Text:
    """The text of a response, or of all chunks of a stream, and their tokens."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True)
class Expected:
    """The text of a request that runs to its last token; found in the first complete response of each prompt."""

    texts: dict[str, str]

    def end(self, prompt: str, tokens: int, text: Text) -> End:
        """Return whether this is the whole text of the prompt."""
        if text.tokens != tokens or text.finish_reason != "length":
            return End(Outcome.LOST, f"{text.tokens} of {tokens} tokens, finish_reason {text.finish_reason!r}")
        expected = self.texts.setdefault(prompt, text.text)
        if text.text != expected:
            return End(Outcome.LOST, f"another text: {text.text[:40]!r}, not {expected[:40]!r}")
        return End(Outcome.COMPLETE)


async def end_of(text: Awaitable[Text], expected: Expected, prompt: str, tokens: int) -> End:
    """Wait for a text of this project's client; return how the request has ended."""
    try:
        return expected.end(prompt, tokens, await text)
    except (LlamaConnectionError, LlamaTimeoutError, RejectedInputError) as error:
        # No request here is at fault.
        return End(Outcome.LOST, str(error))
    except TritonLlamaError as error:
        return End(Outcome.REFUSED, str(error))


def end_of_bytes(received: bytes, expected: Expected, prompt: str, tokens: int) -> End:
    """Return how a request to /generate or /generate_stream has ended, by the bytes until the connection closed."""
    if not received:
        return End(Outcome.LOST, "the connection closed without a response")
    try:
        response = HTTPResponse(_Received(received))
        response.begin()
        body = response.read()
    except HTTPException as error:
        return End(Outcome.CUT, f"{type(error).__name__} after {len(received)} bytes")
    parts = [_parsed(line) for line in body.decode().splitlines() if line]
    errors = [str(part["error"]) for part in parts if "error" in part]
    if errors or response.status != 200:
        return End(Outcome.REFUSED, errors[0] if errors else f"HTTP {response.status}")
    if not parts:
        return End(Outcome.LOST, "a stream without a response")
    text = "".join(str(part["text_output"]) for part in parts)
    whole = Text(text, str(parts[-1]["finish_reason"]), sum(int(part["num_output_tokens"]) for part in parts))
    return expected.end(prompt, tokens, whole)


def _parsed(line: str) -> Mapping[str, Any]:
    parsed: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return parsed


class _Received(socket.socket):
    """A connection that has closed, for http.client."""

    def __init__(self, received: bytes) -> None:
        super().__init__()
        self.close()
        self._bytes = received

    def makefile(self, *_: object, **__: object) -> io.BytesIO:  # type: ignore[override]  # of the one form used
        return io.BytesIO(self._bytes)
