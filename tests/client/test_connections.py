"""Servers that are missing, silent, slow or broken, connection reuse, and closed clients, on real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import httpx
import pytest
from client.peers import HOST, hang_up, respond, server, stay_silent
from client.streaming import both_protocols
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaConnectionError,
    LlamaTimeoutError,
    ServerError,
)
from triton_llama.endpoint import Protocol

Ask = Callable[..., Completion]
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def ask(address: str | int, protocol: Protocol = "http", **limits: float) -> Completion:
    url = address if isinstance(address, str) else f"{HOST}:{address}"
    with LlamaClient(url, protocol, **limits) as client:  # type: ignore[arg-type]  # no headers
        return client.generate("def")


def ask_async(address: str | int, protocol: Protocol = "http", **limits: float) -> Completion:
    url = address if isinstance(address, str) else f"{HOST}:{address}"

    async def run() -> Completion:
        async with AsyncLlamaClient(url, protocol, **limits) as client:  # type: ignore[arg-type]  # no headers
            return await client.generate("def")

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("ask", [ask, ask_async], ids=["sync", "async"])


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port that is bound, so that it stays free, and where no process listens."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]


@both_protocols
@both_clients
def test_a_refused_connection_is_an_error_with_the_address(ask: Ask, protocol: Protocol, dead_port: int) -> None:
    with pytest.raises(LlamaConnectionError, match=f"no connection to {protocol}://{HOST}:{dead_port}: ") as error:
        ask(dead_port, protocol)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        (None, "http"),
        (None, "grpc"),
        ("no-such-host.invalid:8000", "http"),
        ("no-such-host.invalid:8000", "grpc"),
    ],
)
@both_clients
def test_an_unreachable_host_is_a_connection_error(ask: Ask, url: str | None, protocol: Protocol) -> None:
    with server(hang_up) as port, pytest.raises(LlamaConnectionError, match="no connection to") as error:
        ask(url or port, protocol)
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("protocol", "limit", "message"),
    [
        ("http", "timeout", "no data from .* for 1 s"),
        ("grpc", "timeout", "within 1 s"),
        # It never speaks gRPC.
        ("grpc", "connect_timeout", "no connection to"),
    ],
)
@both_clients
def test_a_silent_server_is_a_timeout(ask: Ask, protocol: Protocol, limit: str, message: str) -> None:
    with server(stay_silent) as port, pytest.raises(LlamaTimeoutError, match=message) as error:
        ask(port, protocol, **{limit: 1.0})
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", LlamaConnectionError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", LlamaConnectionError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", ServerError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", ServerError),
        (EMPTY, ServerError),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found", ServerError),
    ],
)
def test_a_broken_response_is_an_error_of_its_kind(answer: bytes, kind: type[Exception]) -> None:
    with server(respond(answer)) as port, pytest.raises(kind) as error:
        ask(port)
    assert type(error.value) is kind
    if kind is LlamaConnectionError:
        assert isinstance(error.value.__cause__, httpx.HTTPError)


@both_protocols
async def test_a_closed_client_raises_runtime_error(protocol: Protocol, dead_port: int) -> None:
    client, twin = LlamaClient(f"{HOST}:{dead_port}", protocol), AsyncLlamaClient(f"{HOST}:{dead_port}", protocol)
    for _ in range(2):
        client.close()
        await twin.close()
    for request in (lambda: client.generate("def"), lambda: next(client.stream("def")), client.status):
        with pytest.raises(RuntimeError, match="closed"):
            request()
    for awaitable in (twin.generate("def"), anext(twin.stream("def")), twin.status()):
        with pytest.raises(RuntimeError, match="closed"):
            await awaitable
