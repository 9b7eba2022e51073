"""Servers that hang up, stay silent, fail or answer nonsense, and closed clients, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest
from client.peers import HOST, hang_up, respond, server, stay_silent
from client.streaming import both_protocols
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from grpc import StatusCode
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


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as triton:
        yield triton


async def test_after_an_error_the_texts_that_wait_are_not_sent(triton: FakeTriton) -> None:
    triton.decoupled, triton.failing, triton.status = False, "INTERNAL: broken", StatusCode.INTERNAL
    url = f"{HOST}:{triton.port}"
    with LlamaClient(url, "grpc") as client, pytest.raises(ServerError, match="broken"):
        client.embed(["a"] * 1000)
    assert len(triton.requests) < 1000
    triton.requests.clear()
    async with AsyncLlamaClient(url, "grpc") as twin:
        with pytest.raises(ServerError, match="broken"):
            await twin.embed(["a"] * 1000)
        await asyncio.to_thread(triton.wait_for, lambda fake: fake.running == 0)
    assert len(triton.requests) < 1000


def test_one_text_instead_of_several_is_refused(triton: FakeTriton) -> None:
    with (
        LlamaClient(f"{HOST}:{triton.port}", "grpc") as client,
        pytest.raises(TypeError, match="texts is one str, must be a sequence of them"),
    ):
        client.embed("text")
