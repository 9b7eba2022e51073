"""Leaving a stream over gRPC, many streams on one client, and what becomes of the server's side: a real gRPC server."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from triton_llama import AsyncLlamaClient, LlamaClient, LlamaConnectionError, LlamaTimeoutError
from tritonclient.grpc.service_pb2 import ModelInferRequest
from unit.grpc_peers import Responses, grpc_server, response, strings
from unit.peers import HOST
from unit.streaming import Stream, both_clients

LAST = response(" é", "stop", prompt_tokens=3, tokens=2)


@both_clients
def test_a_stream_that_never_ends_does_not_outlast_the_timeout_and_the_server_is_told(stream: Stream) -> None:
    left = threading.Event()

    def go_on(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        context.add_callback(left.set)
        while context.is_active():
            yield response("a")

    with grpc_server(go_on) as port:
        streamed = stream(port, "grpc", timeout=0.5)
        assert left.wait(20)
    assert isinstance(streamed.outcome, LlamaTimeoutError)
    assert "within 0.5 s" in str(streamed.outcome)


def test_leaving_one_of_eight_streams_tells_the_server_and_leaves_the_others_alone() -> None:
    together = threading.Barrier(9)
    left = threading.Event()

    def answer(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        if request.raw_input_contents[0] == strings("endless"):
            context.add_callback(left.set)
            yield response("a")
            assert left.wait(20)
            return
        yield response("b")
        # With all of them in mid-stream.
        together.wait(timeout=20)
        assert left.wait(20)
        yield LAST

    with grpc_server(answer) as port, LlamaClient(f"{HOST}:{port}", "grpc") as client, ThreadPoolExecutor(8) as threads:

        def read(_: int) -> str:
            with client.stream("short") as stream:
                return "".join(piece.text for piece in stream)

        others = [threads.submit(read, number) for number in range(8)]
        with client.stream("endless") as stream:
            assert next(stream).text == "a"
            together.wait(timeout=20)
        assert left.wait(20)
        assert [other.result() for other in others] == ["b é"] * 8


async def test_an_async_stream_that_is_left_tells_the_grpc_server() -> None:
    left = threading.Event()

    def wait(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        context.add_callback(left.set)
        yield response("a")
        assert left.wait(20)

    with grpc_server(wait) as port:
        async with AsyncLlamaClient(f"{HOST}:{port}", "grpc") as client, client.stream("def") as stream:
            assert (await anext(stream)).text == "a"
        assert left.wait(20)


def test_closing_the_client_ends_a_stream_in_another_thread() -> None:
    has_come = threading.Event()
    ended = threading.Event()

    def wait(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        context.add_callback(ended.set)
        yield response("a")
        assert ended.wait(20)

    with grpc_server(wait) as port, ThreadPoolExecutor(1) as threads:
        client = LlamaClient(f"{HOST}:{port}", "grpc")

        def read() -> None:
            for _ in client.stream("def"):
                has_come.set()

        reading = threads.submit(read)
        assert has_come.wait(20)
        client.close()
        assert isinstance(reading.exception(timeout=20), LlamaConnectionError)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """Ctrl-C as Python has it, whatever the shell or pytest made of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_in_a_stream_does_not_spoil_the_client() -> None:
    # An interrupt may leave one of grpc's locks locked; whatever comes after must not wait for it.
    waiting = threading.Semaphore(0)
    again = threading.Event()

    def wait(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        if again.is_set():
            yield LAST
            return
        yield response("a")
        waiting.release()
        while context.is_active():
            threading.Event().wait(0.01)

    def press_ctrl_c() -> None:
        assert waiting.acquire(timeout=20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with grpc_server(wait) as port, LlamaClient(f"{HOST}:{port}", "grpc") as client:
        for _ in range(5):
            again.clear()
            ctrl_c = threading.Thread(target=press_ctrl_c)
            ctrl_c.start()
            with client.stream("def") as stream, pytest.raises(KeyboardInterrupt):
                list(stream)
            ctrl_c.join()
            again.set()
            with client.stream("def") as stream:
                assert [piece.text for piece in stream] == [" é"]


async def test_closing_the_async_client_ends_a_stream_in_another_task() -> None:
    has_come = asyncio.Event()
    ended = threading.Event()

    def wait(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        context.add_callback(ended.set)
        yield response("a")
        assert ended.wait(20)

    with grpc_server(wait) as port:
        client = AsyncLlamaClient(f"{HOST}:{port}", "grpc")

        async def read() -> None:
            async for _ in client.stream("def"):
                has_come.set()

        reading = asyncio.create_task(read())
        await has_come.wait()
        await client.close()
        with pytest.raises(LlamaConnectionError, match="the client was closed"):
            await asyncio.wait_for(reading, 20)
