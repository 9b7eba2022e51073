"""Streams over both protocols: chunks, their order, faults and cancellation, on real sockets and real gRPC servers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from client.peers import HOST, answer_with, receive_request, send_chunk, send_head, server
from client.streaming import Stream, both_clients, both_protocols, event, stream, stream_server
from frontend.fake_triton import FakeTriton
from frontend.fake_triton_grpc import fake_triton
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaConnectionError,
    LlamaTimeoutError,
    OverloadedError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
)
from triton_llama.address import Protocol

REFUSED = "top_p is 2, must lie in (0, 1]"
STOPPING = "STOPPING: the server is stopping"


@pytest.fixture
def triton() -> Iterator[FakeTriton]:
    with fake_triton() as triton:
        yield triton


@both_protocols
@both_clients
def test_chunks_add_up_to_a_completion(stream: Stream, protocol: Protocol) -> None:
    with stream_server(protocol, "a\n", " b🙂", " é", ends=True) as peer:
        streamed = stream(peer.port, protocol)
    assert streamed.texts == ["a\n", " b🙂", " é"]
    assert isinstance(streamed.outcome, Completion)
    assert (streamed.outcome.text, streamed.outcome.finish_reason) == ("a\n b🙂 é", "stop")
    assert (streamed.outcome.num_input_tokens, streamed.outcome.num_output_tokens) == (1, 3)


@both_protocols
@both_clients
def test_a_stalled_stream_is_cancelled_at_its_timeout(stream: Stream, protocol: Protocol) -> None:
    with stream_server(protocol, "a", ends=False) as peer:
        streamed = stream(peer.port, protocol, timeout=2.0)
        peer.wait_until_left()
    assert streamed.texts == ["a"]
    assert isinstance(streamed.outcome, LlamaTimeoutError)
    assert ("for 2 s" if protocol == "http" else "within 2 s") in str(streamed.outcome)


@both_clients
def test_a_broken_connection_is_an_error_after_the_chunks_before(stream: Stream) -> None:
    def die(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        send_chunk(connection, event("a"))
        connection.sendall(b"5\r\nda")
        connection.shutdown(socket.SHUT_RDWR)

    with server(die) as port:
        streamed = stream(port)
    assert streamed.texts == ["a"]
    assert isinstance(streamed.outcome, LlamaConnectionError)


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (b"", "the stream ended after 1 chunks without a finish_reason"),
        (b"data: nonsense\n\n", "is not JSON"),
        (b"data: []\n\n", "must be a JSON object"),
        (b"data: {}\n\n", "lacks the output text_output"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_an_event_outside_the_contract_is_a_server_error(garbage: bytes, message: str) -> None:
    with server(answer_with(event("a"), garbage)) as port:
        streamed = stream(port)
    assert streamed.texts[0] == "a"
    assert type(streamed.outcome) is ServerError
    assert message in str(streamed.outcome)
    assert len(str(streamed.outcome)) < 300


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [("400 Bad Request", REFUSED, RejectedInputError), ("503 Service Unavailable", "busy", OverloadedError)],
)
@both_clients
def test_an_answer_that_is_no_stream_is_an_error(
    stream: Stream, status: str, message: str, kind: type[TritonLlamaError]
) -> None:
    """Triton sends its own errors as JSON, and the model's as an event."""
    body = f'{{"error":"{message}"}}'.encode()
    for answer in (body, b"data: " + body + b"\n\n"):
        with server(answer_with(answer, status=status, content_type="text/html")) as port:
            outcome = stream(port).outcome
        assert type(outcome) is kind
        assert str(outcome) == message


@pytest.mark.parametrize(("before", "kind"), [(0, RejectedInputError), (1, ServerError)])
@both_clients
def test_an_error_after_a_chunk_is_the_servers_fault(
    stream: Stream, triton: FakeTriton, before: int, kind: type[TritonLlamaError]
) -> None:
    triton.failing, triton.after_tokens = REFUSED, before
    over_http = answer_with(*[event(" Hello")] * before, f'data: {{"error":"{REFUSED}"}}\n\n'.encode())
    with server(over_http) as port:
        for streamed in (stream(port), stream(triton.port, "grpc")):
            assert streamed.texts == [" Hello"] * before
            assert type(streamed.outcome) is kind
            assert str(streamed.outcome) == REFUSED


@both_clients
def test_a_grpc_status_selects_the_error_also_after_a_chunk(stream: Stream, triton: FakeTriton) -> None:
    triton.failing, triton.status, triton.after_tokens = STOPPING, grpc.StatusCode.UNAVAILABLE, 1
    streamed = stream(triton.port, "grpc")
    assert streamed.texts == [" Hello"]
    assert type(streamed.outcome) is OverloadedError
    assert STOPPING.endswith(str(streamed.outcome))
    assert triton.last.metadata["triton_grpc_error"] == "true"


def test_a_grpc_response_outside_the_contract_is_a_server_error(triton: FakeTriton) -> None:
    triton.broken = lambda response: response.infer_response.raw_output_contents.pop()
    streamed = stream(triton.port, "grpc")
    assert streamed.texts == [" Hello"]
    assert type(streamed.outcome) is ServerError


@both_protocols
async def test_headers_are_sent_with_every_request(triton: FakeTriton, protocol: Protocol) -> None:
    seen: list[str] = []
    triton.failing, triton.status = "busy", grpc.StatusCode.RESOURCE_EXHAUSTED

    def over_http(connection: socket.socket) -> None:
        while request := receive_request(connection):
            seen.append("Zoe" if b"X-User: Zoe\r\n" in request else "")
            send_head(connection, "503 Service Unavailable")
            send_chunk(connection, b"")

    with server(over_http) as http_port:
        url = f"{HOST}:{http_port if protocol == 'http' else triton.port}"
        with LlamaClient(url, protocol, headers={"X-User": "Zoe"}) as client:
            for decoupled, call in ((False, client.generate), (True, lambda prompt: next(client.stream(prompt)))):
                triton.decoupled = decoupled
                with pytest.raises(OverloadedError):
                    call("a")
        async with AsyncLlamaClient(url, protocol, headers={"X-User": "Zoe"}) as twin:
            with pytest.raises(OverloadedError):
                await anext(twin.stream("a"))
            triton.decoupled = False
            with pytest.raises(OverloadedError):
                await twin.generate("a")
    seen += [str(request.metadata["x-user"]) for request in triton.requests]
    assert seen == ["Zoe"] * 4


@both_protocols
def test_a_stream_that_was_left_has_its_text_and_no_completion(protocol: Protocol) -> None:
    with (
        stream_server(protocol, "a", ends=False) as peer,
        LlamaClient(f"{HOST}:{peer.port}", protocol) as client,
    ):
        with client.stream("def") as stream:
            assert next(stream).text == "a"
        peer.wait_until_left()
        assert list(stream) == []
        assert stream.text == "a"
        with pytest.raises(RuntimeError, match="before its last chunk"):
            _ = stream.completion


def test_closing_a_grpc_client_ends_a_stream_in_another_thread(triton: FakeTriton) -> None:
    triton.hold_after = 1
    with ThreadPoolExecutor(1) as threads:
        client = LlamaClient(f"{HOST}:{triton.port}", "grpc")
        reading = threads.submit(list, client.stream("def"))
        triton.wait_for(lambda fake: fake.running == 1)
        client.close()
        assert isinstance(reading.exception(timeout=20), LlamaConnectionError)


@both_protocols
async def test_cancelling_a_task_cancels_its_stream(protocol: Protocol) -> None:
    has_come = asyncio.Event()
    with stream_server(protocol, "a", ends=False) as peer:
        async with AsyncLlamaClient(f"{HOST}:{peer.port}", protocol) as client:

            async def read() -> None:
                async for _ in client.stream("def"):
                    has_come.set()

            reading = asyncio.create_task(read())
            await has_come.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            await asyncio.to_thread(peer.wait_until_left)
