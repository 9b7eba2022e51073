"""`triton-llama run-batch` against servers that are busy, lost or refuse the key."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from client.batch_files import line, read, write
from client.peers import HOST, receive_request, server
from triton_llama.cli import main


def _response(status: str, body: str = "{}", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n{body}".encode()


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a batch of one line against a server that gives these answers, one a connection, the last one for ever."""
    monkeypatch.chdir(tmp_path)

    def failing(*answers: bytes, options: tuple[str, ...] = ()) -> Result:
        left = list(answers)

        def behave(connection: socket.socket) -> None:
            receive_request(connection)
            connection.sendall(left.pop(0) if len(left) > 1 else left[0])
            connection.shutdown(socket.SHUT_RDWR)

        write(line())
        with server(behave) as port:
            files = ("IN.jsonl", "OUT.jsonl")
            return CliRunner().invoke(main, ["run-batch", *files, "--url", f"{HOST}:{port}", *options])

    return failing


@pytest.mark.parametrize("failure", [b"", _response("429 Too Many Requests", headers="Retry-After: 1\r\n")])
def test_a_lost_connection_and_a_busy_server_are_retried(failing: Callable[..., Result], failure: bytes) -> None:
    assert failing(failure, _response("200 OK", '{"a": 1}')).exit_code == 0
    assert read()["a"]["response"]["body"] == {"a": 1}


def test_a_line_without_an_answer_in_time_is_an_error(failing: Callable[..., Result]) -> None:
    assert failing(_response("503 Service Unavailable", "full"), options=("--timeout", "2")).exit_code == 5
    assert read("OUT.errors.jsonl")["a"]["error"] == {
        "code": "batch_expired",
        "message": "no answer within 2 s: 503 full",
    }


def test_a_wrong_key_ends_the_command_and_no_line_is_an_error(failing: Callable[..., Result]) -> None:
    result = failing(_response("401 Unauthorized", "key"), options=("--api-key", "x"))
    assert result.exit_code == 8
    assert "answers 401 key" in result.stderr
    assert read("OUT.errors.jsonl") == {}


def test_a_url_without_a_scheme_has_the_endpoints_port(failing: Callable[..., Result]) -> None:
    failing(b"", options=("--url", "127.0.0.9", "--timeout", "2"))
    assert "127.0.0.9:9000" in read("OUT.errors.jsonl")["a"]["error"]["message"]


@pytest.mark.long
def test_an_endpoint_that_never_responds_ends_the_command(failing: Callable[..., Result]) -> None:
    result = failing(b"")
    assert result.exit_code == 3
    assert "has not responded; --url names the endpoint" in result.stderr
    assert read("OUT.errors.jsonl") == {}
