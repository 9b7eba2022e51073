"""How a request that the server had accepted has ended, as its client knows it."""

from __future__ import annotations

import io
import json
from collections.abc import Awaitable, Sequence
from enum import StrEnum
from http.client import HTTPException, HTTPResponse
from types import SimpleNamespace

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


End = tuple[Outcome, str]
"""An outcome, and the error or the text behind it in a line."""

Chunk = tuple[str, str, int]
"""A text, its finish_reason and its tokens: a whole response, or a delta of a stream."""

Expected = dict[str, str]
"""By prompt, the text of a request that runs to its last token; found in the first complete response."""


def end_of_chunks(chunks: Sequence[Chunk], expected: Expected, prompt: str, tokens: int) -> End:
    """Return whether these are the whole text of the prompt."""
    text = "".join(text for text, _, _ in chunks)
    generated = sum(count for _, _, count in chunks)
    reason = chunks[-1][1] if chunks else ""
    if generated != tokens or reason != "length":
        return Outcome.LOST, f"{generated} of {tokens} tokens, finish_reason {reason!r}"
    if text != expected.setdefault(prompt, text):
        return Outcome.LOST, f"another text: {text[:40]!r}, not {expected[prompt][:40]!r}"
    return Outcome.COMPLETE, ""


async def end_of(chunks: Awaitable[Sequence[Chunk]], expected: Expected, prompt: str, tokens: int) -> End:
    """Wait for a response of this project's client; return how the request has ended."""
    try:
        return end_of_chunks(await chunks, expected, prompt, tokens)
    except (LlamaConnectionError, LlamaTimeoutError, RejectedInputError) as error:
        # No request here is at fault.
        return Outcome.LOST, str(error)
    except TritonLlamaError as error:
        return Outcome.REFUSED, str(error)


def end_of_bytes(received: bytes, expected: Expected, prompt: str, tokens: int) -> End:
    """Return how a request to /generate_stream has ended, by the bytes until the connection closed."""
    if not received:
        return Outcome.LOST, "the connection closed without a response"
    try:
        # Of a socket http.client needs no more.
        response = HTTPResponse(SimpleNamespace(makefile=lambda _: io.BytesIO(received)))  # type: ignore[arg-type]
        response.begin()
        body = response.read()
    except HTTPException as error:
        return Outcome.CUT, f"{type(error).__name__} after {len(received)} bytes"
    events = [json.loads(line.removeprefix("data: ")) for line in body.decode().splitlines() if line]
    errors = [str(event["error"]) for event in events if "error" in event]
    if errors or response.status != 200:
        return Outcome.REFUSED, errors[0] if errors else f"HTTP {response.status}"
    chunks = [(event["text_output"], event["finish_reason"], event["num_output_tokens"]) for event in events]
    return end_of_chunks(chunks, expected, prompt, tokens)
