"""Servers that hang up, stay silent or answer nonsense, and closed clients, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

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
from triton_llama.address import Protocol

Ask = Callable[..., Completion]


def ask(port: int, protocol: Protocol = "http") -> Completion:
    with LlamaClient(f"{HOST}:{port}", protocol, connect_timeout=2.0) as client:
        return client.generate("def")


def ask_async(port: int, protocol: Protocol = "http") -> Completion:
    async def run() -> Completion:
        async with AsyncLlamaClient(f"{HOST}:{port}", protocol) as client:
            return await client.generate("def")

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("ask", [ask, ask_async], ids=["sync", "async"])


@both_protocols
@both_clients
def test_a_lost_connection_is_an_error_with_the_address(ask: Ask, protocol: Protocol) -> None:
    with server(hang_up) as port, pytest.raises(LlamaConnectionError, match="no connection to") as error:
        ask(port, protocol)
    assert f" {protocol}://{HOST}:{port}: " in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


def test_a_server_that_never_speaks_grpc_is_a_timeout() -> None:
    with server(stay_silent) as port, pytest.raises(LlamaTimeoutError, match="no connection to") as error:
        ask(port, "grpc")
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", LlamaConnectionError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", ServerError),
    ],
)
def test_a_broken_response_is_an_error_of_its_kind(answer: bytes, kind: type[Exception]) -> None:
    with server(respond(answer)) as port, pytest.raises(kind) as error:
        ask(port)
    assert type(error.value) is kind
    if kind is LlamaConnectionError:
        assert isinstance(error.value.__cause__, httpx.HTTPError)


@both_protocols
async def test_a_closed_client_raises_runtime_error(protocol: Protocol) -> None:
    client, twin = LlamaClient(HOST, protocol), AsyncLlamaClient(HOST, protocol)
    for _ in range(2):
        client.close()
        await twin.close()
    for request in (lambda: client.generate("def"), lambda: next(client.stream("def")), client.status):
        with pytest.raises(RuntimeError, match="closed"):
            request()
    for awaitable in (twin.generate("def"), anext(twin.stream("def")), twin.status()):
        with pytest.raises(RuntimeError, match="closed"):
            await awaitable
