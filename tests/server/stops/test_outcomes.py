"""What a client has received tells how its request has ended."""

from __future__ import annotations

import json

import pytest
from server.stops.outcomes import Chunk, Outcome, end_of, end_of_bytes
from triton_llama import LlamaConnectionError, OverloadedError, TritonLlamaError

FIRST = {"text_output": "a", "finish_reason": "", "num_output_tokens": 1}
SECOND = {"text_output": "b", "finish_reason": "length", "num_output_tokens": 1}


def _chunked(*events: object, ended: bool = True) -> bytes:
    texts = [f"data: {json.dumps(event)}\n\n" for event in events]
    chunks = "".join(f"{len(text):x}\r\n{text}\r\n" for text in texts)
    return f"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n{chunks}{'0' if ended else ''}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("received", "outcome"),
    [
        (_chunked(FIRST, SECOND), Outcome.COMPLETE),
        (b'HTTP/1.1 404 Not Found\r\nContent-Length: 21\r\n\r\n{"error": "no model"}', Outcome.REFUSED),
        (_chunked(FIRST, {"error": "the server is stopping"}), Outcome.REFUSED),
        (_chunked(FIRST, ended=False), Outcome.CUT),
        (b"", Outcome.LOST),
        (_chunked(), Outcome.LOST),
        (_chunked(FIRST), Outcome.LOST),
        (_chunked(FIRST, {**SECOND, "text_output": "another's"}), Outcome.LOST),
    ],
)
def test_the_bytes_of_a_stream_tell_its_outcome(received: bytes, outcome: Outcome) -> None:
    assert end_of_bytes(received, {"def": "ab"}, "def", 2)[0] is outcome


@pytest.mark.parametrize(
    ("error", "outcome"),
    [(OverloadedError("the server is stopping"), Outcome.REFUSED), (LlamaConnectionError("closed"), Outcome.LOST)],
)
async def test_a_clients_error_tells_the_outcome(error: TritonLlamaError, outcome: Outcome) -> None:
    async def chunks() -> list[Chunk]:
        raise error

    assert (await end_of(chunks(), {}, "def", 2))[0] is outcome
