"""The supervisor's requests to Triton's repository API: errors for unexpected answers."""

from __future__ import annotations

import socket

import pytest
from programs.supervisor.supervisors import free_port
from triton_supervisor.repository_api import MODEL, UNARY, ApiError, NotListeningError, RepositoryApi
from triton_supervisor.triton_http import Address
from unit.peers import respond, server

KEY = "k3y-" * 8


def _answer(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


def _api(port: int, host: str = "127.0.0.1") -> RepositoryApi:
    return RepositoryApi(Address(host, port), KEY)


def test_a_closed_port_is_an_error_of_its_own() -> None:
    api = _api(free_port())
    with pytest.raises(NotListeningError, match="can't be asked: Connection refused"):
        api.unload()
    assert (api.listens(), api.model_is_ready()) == (False, False)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 10**20), ("a" * 70 + ".invalid", 80)])
def test_an_unusable_address_is_an_error(host: str, port: int) -> None:
    api = _api(port, host)
    with pytest.raises(ApiError, match=r"^/v2/repository/index: .* can't be asked: ") as refused:
        api.model_is_loaded()
    assert not isinstance(refused.value, NotListeningError)
    assert (api.listens(), api.model_is_ready()) == (False, False)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_answer(b'{"error":\n "no"}', "403 Forbidden"), 'HTTP 403: {"error": "no"}'),
        (_answer(b"[{}]"), r"HTTP 200: \[{}\]"),
        (_answer(b"\xff"), "HTTP 200: "),
        (b"what?", "can't be asked: "),
    ],
)
def test_an_unexpected_answer_does_not_count_as_unloaded(answer: bytes, message: str) -> None:
    with server(respond(answer)) as port, pytest.raises(ApiError, match=message):
        _api(port).model_is_loaded()


def test_every_model_must_be_ready() -> None:
    def answer(connection: socket.socket) -> None:
        unary = b"/v2/models/llama_unary/" in connection.recv(65536)
        connection.sendall(_answer(b"", "400 Bad Request" if unary else "200 OK"))
        connection.shutdown(socket.SHUT_RDWR)

    with server(answer) as port:
        assert _api(port).model_is_ready()
        assert not RepositoryApi(Address("127.0.0.1", port), KEY, (MODEL, UNARY)).model_is_ready()
