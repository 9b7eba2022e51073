"""What a client has received tells how its request has ended."""

from __future__ import annotations

import json

import pytest
from server.stops.outcomes import Expected, Outcome, Text, end_of, end_of_bytes
from triton_llama import LlamaConnectionError, OverloadedError, RejectedInputError, TritonLlamaError

WHOLE = {"text_output": "ab", "finish_reason": "length", "num_output_tokens": 2}
FIRST = {"text_output": "a", "finish_reason": "", "num_output_tokens": 1}
SECOND = {"text_output": "b", "finish_reason": "length", "num_output_tokens": 1}


def _plain(status: str, body: object) -> bytes:
    text = json.dumps(body)
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def _chunked(*events: object, ended: bool = True) -> bytes:
    texts = [f"data: {json.dumps(event)}\n\n" for event in events]
    chunks = "".join(f"{len(text):x}\r\n{text}\r\n" for text in texts)
    return f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}{'0' if ended else ''}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("received", "outcome"),
    [
        (_plain("200 OK", WHOLE), Outcome.COMPLETE),
        (_chunked(FIRST, SECOND), Outcome.COMPLETE),
        (_plain("404 Not Found", {"error": "has no available versions"}), Outcome.REFUSED),
        (_chunked(FIRST, {"error": "the server is stopping"}), Outcome.REFUSED),
        (_plain("200 OK", WHOLE)[:-5], Outcome.CUT),
        (_chunked(FIRST, ended=False), Outcome.CUT),
        (b"", Outcome.LOST),
        (_chunked(FIRST), Outcome.LOST),
        (_chunked(), Outcome.LOST),
        (_plain("200 OK", {**WHOLE, "finish_reason": "stop"}), Outcome.LOST),
        (_plain("200 OK", {**WHOLE, "text_output": "another"}), Outcome.LOST),
    ],
)
def test_the_bytes_of_a_response_tell_its_outcome(received: bytes, outcome: Outcome) -> None:
    expected = Expected({"def": "ab"})
    assert end_of_bytes(received, expected, "def", 2).outcome is outcome


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OverloadedError("the server is stopping"), Outcome.REFUSED),
        (LlamaConnectionError("Server disconnected without sending a response."), Outcome.LOST),
        (RejectedInputError("max_tokens is 0"), Outcome.LOST),
    ],
)
async def test_a_clients_error_tells_the_outcome(error: TritonLlamaError, outcome: Outcome) -> None:
    async def text() -> Text:
        raise error

    assert (await end_of(text(), Expected({}), "def", 2)).outcome is outcome
