"""The repository API's answers to the supervisor."""

from __future__ import annotations

import pytest
from client.peers import HOST, respond, server
from triton_supervisor.triton import Address, ApiError, RepositoryApi


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (b"403 Forbidden", b'{"error":\n "no"}', 'HTTP 403: {"error": "no"}'),
        (b"200 OK", b"[{}]", r"HTTP 200: \[{}\]"),
        (b"200 OK", b"\xff", "HTTP 200: "),
    ],
)
def test_an_unexpected_answer_does_not_count_as_unloaded(status: bytes, body: bytes, message: str) -> None:
    answer = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
    with server(respond(answer)) as port, pytest.raises(ApiError, match=message):
        RepositoryApi(Address(HOST, port), {}).is_loaded("llama")
