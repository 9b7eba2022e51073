"""Streams over both protocols: events, faults, errors and cancellation, on real sockets and real gRPC servers.

The synchronous client runs the asyncio client's code, so that faults are shown with it; cancellation with both.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaConnectionError,
    OverloadedError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
)
from triton_llama.endpoint import Protocol
from triton_llama.event_stream import LARGEST_EVENT
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse
from unit.peers import (
    HOST,
    Responses,
    answer_with,
    event,
    grpc_server,
    prompt_of,
    receive_request,
    response,
    saying,
    send_chunk,
    send_head,
    server,
    stream_server,
)

LAST = event(" é", "length", prompt_tokens=3, tokens=2)
HALF = "x" * (LARGEST_EVENT // 2)
COMMENT = b": " + b"x" * (LARGEST_EVENT // 4)
MARK = b"\xef\xbb\xbf"

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def stream(port: int, protocol: Protocol = "http") -> tuple[list[str], Completion | TritonLlamaError]:
    """Return the texts of the pieces, and the completion or the error at their end."""
    texts: list[str] = []
    with LlamaClient(f"{HOST}:{port}", protocol, timeout=20.0) as client:
        try:
            with client.stream("def") as running:
                for piece in running:
                    texts.append(piece.text)
        except TritonLlamaError as error:
            return texts, error
        return texts, running.completion


def assert_fails(
    streamed: tuple[list[str], Completion | TritonLlamaError],
    pieces: int,
    kind: type[TritonLlamaError],
    message: str = "",
) -> None:
    """Check that a stream had that many pieces `a` and then failed."""
    texts, outcome = streamed
    assert texts == ["a"] * pieces
    assert type(outcome) is kind
    assert message in str(outcome)
    assert len(str(outcome)) < 300


@pytest.mark.parametrize(
    ("chunks", "texts"),
    [
        pytest.param(
            [bytes([byte]) for byte in (b": hi\n" + event("é🙂\u2028\x85") + LAST).replace(b"\n", b"\r\n")],
            ["é🙂\u2028\x85", " é"],
            id="split at any byte",
        ),
        pytest.param([LAST.replace(b", ", b",\ndata: ")], [" é"], id="in several lines"),
        pytest.param([*[event(HALF)] * 3, LAST], [HALF, HALF, HALF, " é"], id="larger than the bound on one"),
        *[pytest.param([MARK[:cut], MARK[cut:] + LAST], [" é"], id=f"after a mark cut at {cut}") for cut in (1, 2)],
        pytest.param([MARK + LAST], [" é"], id="after a byte order mark"),
        *[
            pytest.param([event("a"), *[COMMENT + end * 2] * 6, LAST], ["a", " é"], id=f"among keep-alives {end!r}")
            for end in (b"\n", b"\r", b"\r\n")
        ],
        pytest.param([b"event: ping\n\nretry: 10\n\nid: 1\n\n", LAST], [" é"], id="among events without data"),
    ],
)
@pytest.mark.parametrize("charset", ["utf-8", "utf-16"])
def test_events_are_decoded_whatever_their_form_and_are_utf_8_whatever_the_charset_says(
    chunks: list[bytes], texts: list[str], charset: str
) -> None:
    with server(answer_with(*chunks, content_type=f"text/event-stream; charset={charset}")) as port:
        found, outcome = stream(port)
    assert found == texts
    assert isinstance(outcome, Completion)
    assert (outcome.text, outcome.finish_reason, outcome.num_input_tokens) == ("".join(texts), "length", 3)
    assert outcome.num_output_tokens == len(texts) + 1


@pytest.mark.parametrize("cut", [b"", b"5\r\nda", b"10", b"4\r\ndata\r\n"])
def test_a_connection_that_breaks_is_a_connection_error_after_the_pieces_before(cut: bytes) -> None:
    def die(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection)
        send_chunk(connection, event("a"))
        connection.sendall(cut)
        connection.shutdown(socket.SHUT_RDWR)

    with server(die) as port:
        assert_fails(stream(port), 1, LlamaConnectionError)


@pytest.mark.parametrize(
    ("garbage", "message"),
    [
        (b"", "the stream ended after 1 pieces without a finish_reason"),
        (b"data: nonsense\n\n", "an event that is not JSON"),
        (b"data: \xff\n\n", "an event that is not JSON"),
        (b"data:\n\n", "an event that is not JSON"),
        (event("X").replace(b"X", b"\xff"), "an event that is not JSON"),
        (b"data: []\n\n", "must be a JSON object"),
        (b"data: {}\n\n", "lacks the output text_output"),
        (b"data: " + b"[" * 100_000 + b"\n\n", "an event that is not JSON"),
        (event("x").rstrip() + b"\n" + event("y"), "an event that is not JSON"),
        (b"data: " + b"x" * (LARGEST_EVENT + 1), "an event of more than 4194304 bytes"),
        (b"data\n" * (LARGEST_EVENT // 5 + 1), "an event of more than 4194304 bytes"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_an_event_outside_the_contract_is_a_server_error_after_the_pieces_before(garbage: bytes, message: str) -> None:
    with server(answer_with(event("a"), garbage)) as port:
        assert_fails(stream(port), 1, ServerError, message)


def test_a_piece_after_the_last_one_is_a_server_error() -> None:
    with server(answer_with(event("a", "length"), event("a"))) as port:
        assert_fails(stream(port), 1, ServerError, "a piece after the one with finish_reason 'length'")


@pytest.mark.parametrize("garbage", [[], [ModelStreamInferResponse()]], ids=["no last piece", "no outputs"])
def test_a_grpc_response_outside_the_contract_is_a_server_error_after_the_pieces_before(
    garbage: list[ModelStreamInferResponse],
) -> None:
    with grpc_server(saying(response("a"), *garbage)) as port:
        assert_fails(stream(port, "grpc"), 1, ServerError)


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_a_refusal_over_http_is_the_error_of_its_words(content_type: str) -> None:
    """Triton sends its own errors as JSON, and the model's as an event."""
    answer = b'{"error":"Exceeds maximum queue size"}'
    body = b"data: " + answer + b"\n\n" if content_type == "text/event-stream" else answer
    with server(answer_with(body, status="400 Bad Request", content_type=content_type)) as port:
        assert_fails(stream(port), 0, OverloadedError, "Exceeds maximum queue size")


@pytest.mark.parametrize(("before", "kind"), [(0, RejectedInputError), (1, ServerError)])
@both_protocols
def test_an_error_message_is_the_requests_fault_only_before_the_first_piece(
    protocol: Protocol, before: int, kind: type[TritonLlamaError]
) -> None:
    over_http = answer_with(*[event("a")] * before, b'data: {"error":"no such thing"}\n\n')
    over_grpc = saying(*[response("a")] * before, ModelStreamInferResponse(error_message="no such thing"))
    with server(over_http) if protocol == "http" else grpc_server(over_grpc) as port:
        assert_fails(stream(port, protocol), before, kind, "no such thing")


def test_an_error_with_a_grpc_status_is_the_error_of_that_status() -> None:
    def fail(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        yield response("a")
        context.abort(grpc.StatusCode.UNAVAILABLE, "the server is on its way out")

    with grpc_server(fail) as port:
        assert_fails(stream(port, "grpc"), 1, OverloadedError, "the server is on its way out")


def test_a_grpc_request_asks_for_pieces_and_for_errors_with_a_status() -> None:
    def look(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        raw = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
        seen.append((request, raw, dict(context.invocation_metadata())))
        yield response("a", "stop")

    seen: list[tuple[ModelInferRequest, dict[str, bytes], dict[str, str]]] = []
    with grpc_server(look) as port:
        outcome = stream(port, "grpc")[1]
    ((request, raw, metadata),) = seen
    assert isinstance(outcome, Completion)
    assert (request.model_name, request.id) == ("llama", outcome.request_id)
    assert (raw["stream"], raw["text_input"]) == (b"\x01", b"\x03\0\0\0def")
    assert int.from_bytes(raw["seed"], "little") == outcome.seed
    assert metadata["triton_grpc_error"] == "true"


def test_a_response_that_is_no_stream_is_a_server_error_and_an_endless_one_is_cut_off() -> None:
    with server(answer_with(b"<html>", content_type="text/html")) as port:
        assert_fails(stream(port), 0, ServerError, "text/html")

    def babble(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection, "502 Bad Gateway", "text/html")
        while True:
            send_chunk(connection, b"x" * 4096)

    with server(babble) as port:
        assert_fails(stream(port), 0, ServerError, "HTTP status 502")


@both_protocols
def test_a_stream_that_was_left_has_no_more_pieces_and_no_completion(protocol: Protocol) -> None:
    with stream_server(protocol, "a") as peer, LlamaClient(f"{HOST}:{peer.port}", protocol) as client:
        with client.stream("def") as stream:
            assert next(stream).text == "a"
            assert not peer.left.is_set()
        assert peer.left.wait(20)
        assert (list(stream), stream.text) == ([], "a")
        with pytest.raises(RuntimeError, match="before its last piece"):
            _ = stream.completion


@both_protocols
async def test_a_loop_that_is_left_without_a_block_cancels_the_request(protocol: Protocol) -> None:
    """Without the garbage collector, which may run much later."""
    gc.disable()
    try:
        with stream_server(protocol, "a") as peer, LlamaClient(f"{HOST}:{peer.port}", protocol) as client:
            for _ in client.stream("def"):
                break
            assert peer.left.wait(20)
        with stream_server(protocol, "a") as peer:
            async with AsyncLlamaClient(f"{HOST}:{peer.port}", protocol) as twin:
                async for _ in twin.stream("def"):
                    break
                assert await asyncio.to_thread(peer.left.wait, 20)
    finally:
        gc.enable()


@both_protocols
def test_closing_the_client_ends_a_stream_in_another_thread_that_reads_or_does_not(protocol: Protocol) -> None:
    has_come = threading.Event()
    with stream_server(protocol, "a") as peer, ThreadPoolExecutor(1) as threads:
        client = LlamaClient(f"{HOST}:{peer.port}", protocol)
        begun = client.stream("def")

        def read() -> None:
            for _ in begun:
                has_come.set()

        reading = threads.submit(read)
        assert has_come.wait(20)
        client.close()
        assert isinstance(reading.exception(timeout=20), LlamaConnectionError)
        with pytest.raises(LlamaConnectionError, match="the client was closed"):
            next(begun)
        begun.close()


@both_protocols
async def test_closing_the_async_client_ends_a_stream_in_another_task(protocol: Protocol) -> None:
    has_come = asyncio.Event()
    with stream_server(protocol, "a") as peer:
        client = AsyncLlamaClient(f"{HOST}:{peer.port}", protocol)

        async def read() -> None:
            async for _ in client.stream("def"):
                has_come.set()

        reading = asyncio.create_task(read())
        await has_come.wait()
        await client.close()
        with pytest.raises(LlamaConnectionError, match="the client was closed"):
            await asyncio.wait_for(reading, 20)


def test_leaving_one_grpc_stream_leaves_the_others_alone() -> None:
    left = threading.Event()

    def answer(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        if prompt_of(request) == "endless":
            context.add_callback(left.set)
        yield response("a")
        assert left.wait(20)
        yield response(" é", "stop")

    with grpc_server(answer) as port, LlamaClient(f"{HOST}:{port}", "grpc") as client, client.stream("short") as other:
        with client.stream("endless") as stream:
            assert (next(other).text, next(stream).text) == ("a", "a")
        assert [piece.text for piece in other] == [" é"]


def test_a_client_still_streams_after_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, again = threading.Semaphore(0), threading.Event()

    def wait(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        if again.is_set():
            yield response(" é", "stop")
            return
        yield response("a")
        waiting.release()
        while context.is_active():
            threading.Event().wait(0.01)

    def press_ctrl_c() -> None:
        assert waiting.acquire(timeout=20)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # Python's handler, in case the shell or pytest replaced it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with grpc_server(wait) as port, LlamaClient(f"{HOST}:{port}", "grpc") as client:
            for _ in range(5):
                again.clear()
                ctrl_c = threading.Thread(target=press_ctrl_c)
                ctrl_c.start()
                with client.stream("def") as stream, pytest.raises(KeyboardInterrupt):
                    list(stream)
                ctrl_c.join()
                again.set()
                assert [piece.text for piece in client.stream("def")] == [" é"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_value_no_tensor_can_hold_is_refused_at_once_and_one_json_lacks_at_the_first_piece() -> None:
    with LlamaClient("no-such-host.invalid") as client:
        with pytest.raises(RejectedInputError, match="seed is -1"):
            client.stream("def", seed=-1)
        with (
            client.stream("def", temperature=float("nan")) as stream,
            pytest.raises(RejectedInputError, match="temperature is nan, must be finite"),
        ):
            next(stream)
        # A stream that isn't read sends nothing.
        with client.stream("def") as unread:
            assert unread.text == ""
