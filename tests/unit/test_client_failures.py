"""Servers that aren't there, don't answer or break off: real sockets, both protocols, both clients."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.client import HTTPException

import pytest
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaConnectionError,
    LlamaTimeoutError,
    ServerError,
)
from triton_llama.endpoint import Protocol
from unit.peers import HOST, hang_up, respond, server, stay_silent

Ask = Callable[..., Completion]


def ask(
    port: int, protocol: Protocol, *, host: str = HOST, timeout: float = 20.0, connect_timeout: float = 10.0
) -> Completion:
    url = f"{host}:{port}"
    with LlamaClient(url, protocol, timeout=timeout, connect_timeout=connect_timeout) as client:
        return client.generate("def")


def ask_async(
    port: int, protocol: Protocol, *, host: str = HOST, timeout: float = 20.0, connect_timeout: float = 10.0
) -> Completion:
    url = f"{host}:{port}"

    async def run() -> Completion:
        async with AsyncLlamaClient(url, protocol, timeout=timeout, connect_timeout=connect_timeout) as client:
            return await client.generate("def")

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("ask", [ask, ask_async], ids=["sync", "async"])
both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port that is bound, so that nobody else takes it, and where nobody listens."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]


@both_protocols
@both_clients
def test_nothing_listening_is_a_connection_error_that_names_the_address(
    ask: Ask, protocol: Protocol, dead_port: int
) -> None:
    with pytest.raises(LlamaConnectionError, match=f"no connection to {protocol}://{HOST}:{dead_port}: ") as error:
        ask(dead_port, protocol)
    assert "refused" in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


@both_protocols
@both_clients
def test_an_unknown_host_is_a_connection_error(ask: Ask, protocol: Protocol) -> None:
    with pytest.raises(LlamaConnectionError, match=r"no connection to .*no-such-host\.invalid"):
        ask(8000, protocol, host="no-such-host.invalid")


@both_protocols
@both_clients
def test_a_server_that_never_answers_is_a_timeout_that_names_the_seconds(ask: Ask, protocol: Protocol) -> None:
    with server(stay_silent) as port, pytest.raises(LlamaTimeoutError, match=r"within 0\.5 s") as error:
        ask(port, protocol, timeout=0.5)
    assert error.value.__cause__ is not None


@both_clients
def test_a_server_that_never_speaks_grpc_is_a_connect_timeout(ask: Ask) -> None:
    with server(stay_silent) as port, pytest.raises(LlamaTimeoutError, match="no connection to"):
        ask(port, "grpc", connect_timeout=0.5)


@both_clients
def test_a_connection_that_is_never_accepted_is_a_connect_timeout(ask: Ask) -> None:
    with socket.create_server((HOST, 0), backlog=0) as listener, ExitStack() as stack:
        # Fill the queue of connections that nobody accepts; the system then drops the next one's first packet.
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        with pytest.raises(LlamaTimeoutError, match=r"no connection to .* within 0\.5 s"):
            ask(listener.getsockname()[1], "http", connect_timeout=0.5)


@both_protocols
@both_clients
def test_a_server_that_hangs_up_is_a_connection_error(ask: Ask, protocol: Protocol) -> None:
    with server(hang_up) as port, pytest.raises(LlamaConnectionError, match="no connection to"):
        ask(port, protocol)


@both_clients
def test_an_answer_that_breaks_off_is_a_connection_error(ask: Ask) -> None:
    half = respond(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
    with server(half) as port, pytest.raises(LlamaConnectionError):
        ask(port, "http")


@both_clients
def test_an_answer_that_trickles_does_not_outlast_the_timeout(ask: Ask) -> None:
    def trickle(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
        while True:
            connection.sendall(b" ")
            time.sleep(0.05)

    with server(trickle) as port, pytest.raises(LlamaTimeoutError, match=r"within 0\.5 s"):
        ask(port, "http", timeout=0.5)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nInference-Header-Content-Length: x\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found",
    ],
)
@both_clients
def test_a_server_that_is_no_triton_is_a_server_error(ask: Ask, answer: bytes) -> None:
    with server(respond(answer)) as port, pytest.raises(ServerError):
        ask(port, "http")


@both_clients
def test_something_that_is_not_http_is_a_connection_error(ask: Ask) -> None:
    with server(respond(b"SSH-2.0-OpenSSH_9.2\r\n")) as port, pytest.raises(LlamaConnectionError):
        ask(port, "http")


def test_a_kept_connection_that_the_server_has_closed_is_replaced() -> None:
    empty = respond(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
    with server(empty) as port, LlamaClient(f"{HOST}:{port}") as client:
        for _ in range(3):
            with pytest.raises(ServerError, match="lacks the output"):
                client.generate("def")
            time.sleep(0.05)


@both_protocols
def test_closing_the_client_ends_a_request_in_another_thread(protocol: Protocol) -> None:
    with server(stay_silent) as port:
        client = LlamaClient(f"{HOST}:{port}", protocol, timeout=60.0, connect_timeout=60.0)
        errors: list[Exception] = []

        def wait() -> None:
            try:
                client.generate("def")
            except LlamaConnectionError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.5)
        client.close()
        thread.join(timeout=20)
        assert not thread.is_alive()
        assert len(errors) == 1


@both_protocols
def test_a_closed_client_says_so(protocol: Protocol, dead_port: int) -> None:
    client = LlamaClient(f"{HOST}:{dead_port}", protocol)
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        client.generate("def")


@both_protocols
async def test_a_closed_async_client_says_so(protocol: Protocol, dead_port: int) -> None:
    client = AsyncLlamaClient(f"{HOST}:{dead_port}", protocol)
    await client.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        await client.generate("def")


@both_protocols
async def test_a_cancelled_task_gives_up_at_once_and_the_list_with_it(protocol: Protocol) -> None:
    with server(stay_silent) as port:
        async with AsyncLlamaClient(f"{HOST}:{port}", protocol, connect_timeout=60.0) as client:
            task = asyncio.create_task(client.generate(["a", "b", "c"]))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


@both_protocols
def test_a_list_reports_which_prompt_failed(protocol: Protocol, dead_port: int) -> None:
    with LlamaClient(f"{HOST}:{dead_port}", protocol) as client:
        with pytest.raises(LlamaConnectionError) as error:
            client.generate(["a", "b"])
        assert error.value.prompt_index == 0
        kept = client.generate(["a", "b"], return_exceptions=True)
    assert [type(one) for one in kept] == [LlamaConnectionError, LlamaConnectionError]


@both_protocols
def test_an_empty_list_needs_no_server(protocol: Protocol, dead_port: int) -> None:
    with LlamaClient(f"{HOST}:{dead_port}", protocol) as client:
        assert client.generate([]) == []


def test_the_standard_librarys_error_is_kept_as_the_cause() -> None:
    with server(respond(b"nonsense\r\n\r\n")) as port, pytest.raises(LlamaConnectionError) as error:
        ask(port, "http")
    assert isinstance(error.value.__cause__, HTTPException)
