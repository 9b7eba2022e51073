"""Leaving a stream early, using it wrongly, and what becomes of its connection."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Iterator

import pytest
from triton_llama import AsyncLlamaClient, LlamaClient, LlamaConnectionError, RejectedInputError
from triton_llama.endpoint import Protocol
from unit.peers import HOST, receive_request, send_chunk, send_head, server
from unit.streaming import event

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


class Endless:
    """Answers with one piece and then nothing, until the client leaves."""

    def __init__(self) -> None:
        self.left = threading.Event()
        self.begun = threading.Event()

    def __call__(self, connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        send_chunk(connection, event("a"))
        self.begun.set()
        try:
            connection.recv(1)
        finally:
            # Either the end of the connection or its reset.
            self.left.set()


@pytest.fixture
def endless() -> Endless:
    return Endless()


@pytest.fixture
def port(endless: Endless) -> Iterator[int]:
    with server(endless) as number:
        yield number


def test_leaving_the_block_tells_the_server(port: int, endless: Endless) -> None:
    with LlamaClient(f"{HOST}:{port}") as client:
        with client.stream("def") as stream:
            assert next(stream).text == "a"
            assert not endless.left.is_set()
        assert endless.left.wait(20)
        assert list(stream) == []
        assert stream.text == "a"
        with pytest.raises(RuntimeError, match="before its last piece"):
            _ = stream.completion


def test_a_loop_that_is_left_tells_the_server_without_a_block(port: int, endless: Endless) -> None:
    with LlamaClient(f"{HOST}:{port}") as client:
        for _ in client.stream("def"):
            break
        gc.collect()
        assert endless.left.wait(20)


async def test_leaving_the_async_block_tells_the_server(port: int, endless: Endless) -> None:
    async with AsyncLlamaClient(f"{HOST}:{port}") as client:
        async with client.stream("def") as stream:
            assert (await anext(stream)).text == "a"
        assert await asyncio.to_thread(endless.left.wait, 20)
        assert [piece async for piece in stream] == []


async def test_a_cancelled_task_tells_the_server(port: int, endless: Endless) -> None:
    async with AsyncLlamaClient(f"{HOST}:{port}") as client:

        async def read() -> None:
            async with client.stream("def") as stream:
                async for _ in stream:
                    pass

        task = asyncio.create_task(read())
        assert await asyncio.to_thread(endless.begun.wait, 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(endless.left.wait, 20)


def test_closing_the_client_ends_a_stream_in_another_thread(port: int) -> None:
    client = LlamaClient(f"{HOST}:{port}")
    has_come = threading.Event()
    errors: list[LlamaConnectionError] = []

    def read() -> None:
        try:
            for _ in client.stream("def"):
                has_come.set()
        except LlamaConnectionError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert has_come.wait(20)
    client.close()
    thread.join(timeout=20)
    assert len(errors) == 1


async def test_closing_the_async_client_ends_a_stream_in_another_task(port: int) -> None:
    client = AsyncLlamaClient(f"{HOST}:{port}")
    has_come = asyncio.Event()

    async def read() -> None:
        async for _ in client.stream("def"):
            has_come.set()

    reading = asyncio.create_task(read())
    await has_come.wait()
    await client.close()
    with pytest.raises(LlamaConnectionError, match="the client was closed"):
        await asyncio.wait_for(reading, 20)


def test_streams_read_to_their_end_share_a_connection() -> None:
    connections = 0

    def keep_alive(connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        while receive_request(connection):
            send_head(connection)
            send_chunk(connection, event("a", "stop", prompt_tokens=1))
            send_chunk(connection, b"")

    with server(keep_alive) as port, LlamaClient(f"{HOST}:{port}") as client:
        for _ in range(3):
            with client.stream("def") as stream:
                assert [piece.text for piece in stream] == ["a"]
    assert connections == 1


@both_protocols
async def test_a_stream_that_nobody_reads_sends_nothing(protocol: Protocol) -> None:
    with LlamaClient("no-such-host.invalid", protocol) as client, client.stream("def") as unread:
        assert unread.text == ""
    async with AsyncLlamaClient("no-such-host.invalid", protocol) as twin, twin.stream("def") as unread_too:
        assert unread_too.text == ""


@both_protocols
async def test_a_closed_client_says_so_when_its_stream_is_read(protocol: Protocol) -> None:
    client, twin = LlamaClient(HOST, protocol), AsyncLlamaClient(HOST, protocol)
    client.close()
    await twin.close()
    with pytest.raises(RuntimeError, match="the client is closed"):
        next(client.stream("def"))
    with pytest.raises(RuntimeError, match="the client is closed"):
        await anext(twin.stream("def"))


@both_protocols
def test_an_impossible_value_is_refused_at_once(protocol: Protocol) -> None:
    with LlamaClient(HOST, protocol) as client, pytest.raises(RejectedInputError, match="seed is -1"):
        client.stream("def", seed=-1)


def test_a_number_that_json_has_not_is_refused_by_name() -> None:
    with (
        LlamaClient(HOST) as client,
        client.stream("def", temperature=float("nan")) as stream,
        pytest.raises(RejectedInputError, match="temperature is nan, must be finite"),
    ):
        next(stream)
