"""Streams over both protocols: chunks, their order, faults and cancellation, on real sockets and real gRPC servers."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from client.grpc_peers import Responses, grpc_server, response, saying, strings
from client.peers import HOST, answer_with, receive_request, send_chunk, send_head, server
from client.streaming import Stream, both_clients, both_protocols, event, stream, stream_server
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
from triton_llama.endpoint import Protocol
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse

LAST = event(" é", "length", tokens=2)
REFUSED = "top_p is 2, must lie in (0, 1]"
FULL = "Exceeds maximum queue size"


@both_protocols
@both_clients
def test_chunks_add_up_to_a_completion(stream: Stream, protocol: Protocol) -> None:
    has_come = threading.Semaphore(0)

    def wait_for_the_reader() -> None:
        assert has_come.acquire(timeout=20), "the chunk before was handed out"

    with stream_server(protocol, "a\n", " b🙂", last=" é", after_each=wait_for_the_reader) as peer:
        streamed = stream(peer.port, protocol, on_chunk=lambda _: has_come.release())
    assert streamed.texts == ["a\n", " b🙂", " é"]
    assert isinstance(streamed.outcome, Completion)
    assert (streamed.outcome.text, streamed.outcome.finish_reason) == ("a\n b🙂 é", "length")
    assert (streamed.outcome.num_input_tokens, streamed.outcome.num_output_tokens) == (3, 4)


@both_protocols
@both_clients
def test_a_stalled_stream_is_cancelled_at_its_timeout(stream: Stream, protocol: Protocol) -> None:
    with stream_server(protocol, "a") as peer:
        streamed = stream(peer.port, protocol, timeout=1.0)
        assert peer.left.wait(20)
    assert streamed.texts == ["a"]
    assert isinstance(streamed.outcome, LlamaTimeoutError)
    assert ("for 1 s" if protocol == "http" else "within 1 s") in str(streamed.outcome)


@pytest.mark.parametrize("cut", [b"", b"5\r\nda"])
@both_clients
def test_a_broken_connection_is_an_error_after_the_chunks_before(stream: Stream, cut: bytes) -> None:
    def die(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        send_chunk(connection, event("a"))
        connection.sendall(cut)
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
    [
        ("400 Bad Request", REFUSED, RejectedInputError),
        ("400 Bad Request", FULL, OverloadedError),
        ("400 Bad Request", "INTERNAL: decoding failed", ServerError),
        ("503 Service Unavailable", FULL, OverloadedError),
    ],
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
        assert str(outcome) == message.removeprefix("INTERNAL: ")


@pytest.mark.parametrize(("before", "kind"), [(0, RejectedInputError), (1, ServerError)])
@both_protocols
@both_clients
def test_an_error_after_a_chunk_is_the_servers_fault(
    stream: Stream, protocol: Protocol, before: int, kind: type[TritonLlamaError]
) -> None:
    over_http = answer_with(*[event("a")] * before, f'data: {{"error":"{REFUSED}"}}\n\n'.encode())
    over_grpc = saying(*[response("a")] * before, ModelStreamInferResponse(error_message=REFUSED))
    with server(over_http) if protocol == "http" else grpc_server(over_grpc) as port:
        streamed = stream(port, protocol)
    assert streamed.texts == ["a"] * before
    assert type(streamed.outcome) is kind
    assert str(streamed.outcome) == REFUSED


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, REFUSED, RejectedInputError),
        (grpc.StatusCode.UNAVAILABLE, "STOPPING: the server is stopping", OverloadedError),
        (grpc.StatusCode.CANCELLED, "CANCELLED: the request was cancelled", ServerError),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
@both_clients
def test_a_grpc_status_selects_the_error(
    stream: Stream, before: int, status: grpc.StatusCode, message: str, kind: type[TritonLlamaError]
) -> None:
    def fail(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        yield from [response("a")] * before
        context.abort(status, message)

    with grpc_server(fail) as port:
        streamed = stream(port, "grpc")
    assert streamed.texts == ["a"] * before
    assert type(streamed.outcome) is kind
    assert message.endswith(str(streamed.outcome))


def broken(change: Callable[[ModelStreamInferResponse], object]) -> ModelStreamInferResponse:
    answer = response("x")
    change(answer)
    return answer


@pytest.mark.parametrize(
    "garbage",
    [
        [],
        [ModelStreamInferResponse()],
        [broken(lambda answer: answer.infer_response.outputs.pop())],
        [broken(lambda answer: answer.infer_response.raw_output_contents.pop())],
        [broken(lambda answer: answer.infer_response.raw_output_contents.__setitem__(2, b"x"))],
    ],
    ids=["no last chunk", "empty", "no output", "no content", "count"],
)
def test_a_grpc_response_outside_the_contract_is_a_server_error(
    garbage: list[ModelStreamInferResponse],
) -> None:
    with grpc_server(saying(response("a"), *garbage)) as port:
        streamed = stream(port, "grpc")
    assert streamed.texts == ["a"]
    assert type(streamed.outcome) is ServerError


@both_clients
def test_a_grpc_stream_requests_errors_with_a_status(stream: Stream) -> None:
    seen: list[tuple[ModelInferRequest, dict[str, str]]] = []

    def look(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        seen.append((request, dict(context.invocation_metadata())))
        yield response("a", "stop")

    with grpc_server(look) as port:
        outcome = stream(port, "grpc").outcome
    ((request, metadata),) = seen
    assert isinstance(outcome, Completion)
    assert (request.model_name, request.id) == ("llama", outcome.request_id)
    raw = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
    assert (raw["stream"], raw["text_input"]) == (b"\x01", strings("def"))
    assert int.from_bytes(raw["seed"], "little") == outcome.seed
    assert metadata["triton_grpc_error"] == "true"


@both_protocols
async def test_headers_are_sent_with_every_request(protocol: Protocol) -> None:
    seen: list[str] = []

    def over_http(connection: socket.socket) -> None:
        while request := receive_request(connection):
            seen.append("Zoe" if b"X-User: Zoe\r\n" in request else "")
            send_head(connection, "503 Service Unavailable")
            send_chunk(connection, b"")

    def over_grpc(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        seen.append(str(dict(context.invocation_metadata()).get("x-user")))
        yield from ()
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")

    headers = {"X-User": "Zoe"}
    with server(over_http) if protocol == "http" else grpc_server(over_grpc) as port:
        with LlamaClient(f"{HOST}:{port}", protocol, headers=headers) as client:
            for call in (lambda: client.generate("a"), lambda: next(client.stream("a"))):
                with pytest.raises(OverloadedError):
                    call()
        async with AsyncLlamaClient(f"{HOST}:{port}", protocol, headers=headers) as twin:
            for awaitable in (twin.generate("a"), anext(twin.stream("a"))):
                with pytest.raises(OverloadedError):
                    await awaitable
    assert seen == ["Zoe"] * 4


def test_a_stream_over_http_has_lists_only_where_the_input_is_a_list() -> None:
    requests: list[bytes] = []

    def keep(connection: socket.socket) -> None:
        requests.append(receive_request(connection))
        send_head(connection)
        send_chunk(connection, LAST)
        send_chunk(connection, b"")

    with server(keep) as port, LlamaClient(f"{HOST}:{port}") as client:
        list(client.stream("def", stop_words=["a", "b"], max_tokens=7))
    fields = json.loads(requests[0].partition(b"\r\n\r\n")[2])
    assert (fields["stop_words"], fields["bad_words"], fields["max_tokens"]) == (["a", "b"], [""], 7)
    assert (fields["text_input"], fields["stream"]) == ("def", True)


@both_protocols
async def test_leaving_the_block_cancels_the_request(protocol: Protocol) -> None:
    with stream_server(protocol, "a") as peer, LlamaClient(f"{HOST}:{peer.port}", protocol) as client:
        with client.stream("def") as stream:
            assert next(stream).text == "a"
            assert not peer.left.is_set()
        assert peer.left.wait(20)
        assert list(stream) == []
        assert stream.text == "a"
        with pytest.raises(RuntimeError, match="before its last chunk"):
            _ = stream.completion
    with stream_server(protocol, "a") as peer:
        async with AsyncLlamaClient(f"{HOST}:{peer.port}", protocol) as twin:
            async with twin.stream("def") as other:
                assert (await anext(other)).text == "a"
            assert await asyncio.to_thread(peer.left.wait, 20)
            assert [chunk async for chunk in other] == []


def test_closing_a_grpc_client_ends_a_stream_in_another_thread() -> None:
    with stream_server("grpc", "a") as peer, ThreadPoolExecutor(1) as threads:
        client = LlamaClient(f"{HOST}:{peer.port}", "grpc")
        reading = threads.submit(list, client.stream("def"))
        assert peer.begun.wait(20)
        client.close()
        assert isinstance(reading.exception(timeout=20), LlamaConnectionError)


@both_protocols
async def test_cancelling_a_task_cancels_its_stream(protocol: Protocol) -> None:
    has_come = asyncio.Event()
    with stream_server(protocol, "a") as peer:
        async with AsyncLlamaClient(f"{HOST}:{peer.port}", protocol) as client:

            async def read() -> None:
                async for _ in client.stream("def"):
                    has_come.set()

            reading = asyncio.create_task(read())
            await has_come.wait()
            reading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reading
            assert await asyncio.to_thread(peer.left.wait, 20)
