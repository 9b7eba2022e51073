"""Requests, lists, and servers that are missing, silent, slow or broken; connection reuse and closed clients.

On real sockets. The synchronous client runs the asyncio client's code, so that most is shown with it alone.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from types import NoneType, SimpleNamespace

import grpc
import httpx
import pytest
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaConnectionError,
    LlamaTimeoutError,
    OverloadedError,
    RejectedInputError,
    ServerError,
)
from triton_llama.endpoint import Protocol
from tritonclient.grpc.service_pb2 import ModelInferRequest
from unit.peers import (
    HOST,
    Responses,
    grpc_server,
    hang_up,
    http_answer,
    prompt_of,
    receive_request,
    respond,
    response,
    server,
    stay_silent,
    stream_server,
)

_CUT = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
_BAD_LENGTH = http_answer(b"{}", "Inference-Header-Content-Length: x")
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nnot found"

both_protocols = pytest.mark.parametrize("protocol", ["http", "grpc"])


def ask(
    url: str | int, protocol: Protocol = "http", timeout: float = 20.0, connect_timeout: float = 10.0
) -> Completion:
    """Complete a prompt at a URL, or at a port of this machine."""
    address = url if isinstance(url, str) else f"{HOST}:{url}"
    with LlamaClient(address, protocol, timeout=timeout, connect_timeout=connect_timeout) as client:
        return client.generate("def")


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port that is bound, so that it stays free, and where no process listens."""
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        yield bound.getsockname()[1]


@both_protocols
def test_a_refused_connection_is_a_connection_error_that_names_the_address(protocol: Protocol, dead_port: int) -> None:
    with pytest.raises(LlamaConnectionError, match=f"no connection to {protocol}://{HOST}:{dead_port}: ") as error:
        ask(dead_port, protocol)
    assert "refused" in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        ("no-such-host.invalid:8000", "http"),
        ("no-such-host.invalid:8000", "grpc"),
        ("http://exämple-.com:8000", "http"),
        ("http://host:8000/a\x01b", "http"),
        (f"http://{'a' * 64}.com:8000", "http"),
    ],
)
def test_a_host_or_url_that_cannot_be_requested_is_a_connection_error(url: str, protocol: Protocol) -> None:
    with pytest.raises(LlamaConnectionError, match="no connection to") as error:
        ask(url, protocol)
    assert error.value.__cause__ is not None


def trickle(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("protocol", "behave"),
    [("http", stay_silent), ("grpc", stay_silent), ("http", trickle)],
    ids=["http", "grpc", "http that trickles"],
)
def test_a_server_without_a_complete_answer_is_a_timeout_that_names_the_seconds(
    protocol: Protocol, behave: Callable[[socket.socket], None]
) -> None:
    with server(behave) as port, pytest.raises(LlamaTimeoutError, match=r"within 0\.3 s") as error:
        ask(port, protocol, timeout=0.3)
    assert error.value.__cause__ is not None


def test_a_server_that_never_speaks_grpc_is_a_connect_timeout() -> None:
    with server(stay_silent) as port, pytest.raises(LlamaTimeoutError, match="no connection to"):
        ask(port, "grpc", connect_timeout=0.3)


def test_a_connection_that_is_never_accepted_is_a_connect_timeout() -> None:
    with socket.create_server((HOST, 0), backlog=0) as listener, ExitStack() as stack:
        # With a full queue of connections to accept, the system drops the next one's first packet.
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        with pytest.raises(LlamaTimeoutError, match=r"no connection to .* within 0\.3 s"):
            ask(listener.getsockname()[1], connect_timeout=0.3)


@pytest.mark.parametrize(
    ("answer", "kind", "message", "cause"),
    [
        (b"", LlamaConnectionError, "no connection to .*: Server disconnected", httpx.HTTPError),
        (_CUT, LlamaConnectionError, "no connection to .*: peer closed connection", httpx.HTTPError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", LlamaConnectionError, "no connection to ", httpx.HTTPError),
        (http_answer(b"hello"), ServerError, "not one of Triton's inference protocol: Expecting value", ValueError),
        (http_answer(b"[]"), ServerError, "not one of Triton's inference protocol: 'list' object", AttributeError),
        (_BAD_LENGTH, ServerError, "not one of Triton's inference protocol: invalid literal", ValueError),
        (http_answer(b"{}"), ServerError, "the server's answer lacks the output text_output", NoneType),
        (_NOT_FOUND, ServerError, "HTTP status 404: not found", NoneType),
    ],
)
def test_a_broken_response_is_a_connection_error_and_one_outside_the_contract_a_server_error(
    answer: bytes, kind: type[Exception], message: str, cause: type
) -> None:
    with server(respond(answer)) as port, pytest.raises(kind, match=message) as error:
        ask(port)
    assert type(error.value) is kind
    assert isinstance(error.value.__cause__, cause)


def test_a_server_that_hangs_up_on_grpc_is_a_connection_error() -> None:
    with server(hang_up) as port, pytest.raises(LlamaConnectionError, match="no connection to"):
        ask(port, "grpc")


def test_a_request_has_its_tensors_after_the_json_and_the_response_too() -> None:
    seen: list[bytes] = []
    outputs = [("text_output", "BYTES", b"\x02\0\0\0\xc3\xa9"), ("finish_reason", "BYTES", b"\x04\0\0\0stop")]
    outputs += [("num_input_tokens", "INT32", b"\x03\0\0\0"), ("num_output_tokens", "INT32", b"\x05\0\0\0")]
    listed = [
        {"name": name, "datatype": kind, "shape": [1, 1], "parameters": {"binary_data_size": len(content)}}
        for name, kind, content in outputs
    ]
    header = json.dumps({"outputs": listed}).encode()
    body = header + b"".join(content for _, _, content in outputs)

    def answer(connection: socket.socket) -> None:
        seen.append(receive_request(connection))
        connection.sendall(http_answer(body, f"Inference-Header-Content-Length: {len(header)}"))

    with server(answer) as port:
        completion = ask(port)
    assert (completion.text, completion.finish_reason) == ("é", "stop")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 5)
    request_head, _, request_body = seen[0].partition(b"\r\n\r\n")
    lines = request_head.decode().lower().split("\r\n")
    assert lines[0] == "post /v2/models/llama/infer http/1.1"
    assert "accept-encoding: identity" in lines
    (length,) = [int(line.split(":")[1]) for line in lines if line.startswith("inference-header-content-length")]
    fields = json.loads(request_body[:length])
    assert fields["id"] == completion.request_id
    assert all(output["parameters"] == {"binary_data": True} for output in fields["outputs"])
    assert request_body[length:].startswith(b"\x03\0\0\0def")
    assert len(request_body) - length == sum(one["parameters"]["binary_data_size"] for one in fields["inputs"])


def test_a_response_in_json_alone_is_a_completion() -> None:
    values = {"text_output": ["é"], "finish_reason": [["stop"]], "num_input_tokens": [3], "num_output_tokens": [5]}
    outputs = [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": data} for name, data in values.items()]
    with server(respond(http_answer(json.dumps({"outputs": outputs}).encode()))) as port:
        completion = ask(port)
    assert (completion.text, completion.finish_reason) == ("é", "stop")
    assert (completion.num_input_tokens, completion.num_output_tokens) == (3, 5)


def test_header_values_are_sent_as_utf_8_without_blanks_around_them_and_cookies_never() -> None:
    heads: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        heads.append(receive_request(connection))
        connection.sendall(http_answer(b"{}", "Set-Cookie: node=1; Path=/", "Connection: close"))

    with server(answer) as port, LlamaClient(f"{HOST}:{port}", headers={"X-User": " Zoë\t"}) as client:
        for _ in range(2):
            with pytest.raises(ServerError, match="lacks the output"):
                client.generate("def")
    assert [b"\r\nX-User: Zo\xc3\xab\r\n" in head for head in heads] == [True, True]
    assert not any(b"\r\ncookie:" in head.lower() for head in heads)


def test_a_connection_that_was_idle_for_15_seconds_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been dropped silently on the way."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("httpcore._async.http11.time", SimpleNamespace(monotonic=lambda: clock.now))
    connections = []

    def answer(connection: socket.socket) -> None:
        connections.append(connection)
        while receive_request(connection):
            connection.sendall(http_answer(b"{}"))

    with server(answer) as port, LlamaClient(f"{HOST}:{port}") as client:
        for clock.now, expected in [(0.0, 1), (14.0, 1), (30.0, 2)]:
            with pytest.raises(ServerError, match="lacks the output"):
                client.generate("def")
            assert len(connections) == expected


def test_a_connection_that_the_server_has_closed_is_replaced() -> None:
    with server(respond(http_answer(b"{}"))) as port, LlamaClient(f"{HOST}:{port}") as client:
        for _ in range(3):
            with pytest.raises(ServerError, match="lacks the output"):
                client.generate("def")
            time.sleep(0.05)


def test_complete_streams_share_a_connection() -> None:
    """The server takes one connection at a time."""
    with stream_server("http", "a", last="b") as peer, LlamaClient(f"{HOST}:{peer.port}") as client:
        assert ["".join(map(str, client.stream("def"))) for _ in range(3)] == ["ab"] * 3


@both_protocols
def test_closing_the_client_ends_a_request_in_another_thread(protocol: Protocol) -> None:
    waiting = threading.Event()

    def wait(connection: socket.socket) -> None:
        connection.recv(65536)
        waiting.set()

    with server(wait) as port, ThreadPoolExecutor(1) as threads:
        client = LlamaClient(f"{HOST}:{port}", protocol, timeout=60.0, connect_timeout=60.0)
        request = threads.submit(client.generate, "def")
        assert waiting.wait(20)
        client.close()
        assert isinstance(request.exception(timeout=20), LlamaConnectionError)


@both_protocols
async def test_a_closed_client_raises_runtime_error(protocol: Protocol, dead_port: int) -> None:
    client, twin = LlamaClient(f"{HOST}:{dead_port}", protocol), AsyncLlamaClient(f"{HOST}:{dead_port}", protocol)
    for _ in range(2):
        client.close()
        await twin.close()
    for request in (lambda: client.generate("def"), lambda: next(client.stream("def")), client.status):
        with pytest.raises(RuntimeError, match="the client is closed"):
            request()
    for awaitable in (twin.generate("def"), anext(twin.stream("def")), twin.status()):
        with pytest.raises(RuntimeError, match="the client is closed"):
            await awaitable


def test_a_client_that_is_not_closed_ends_its_thread_when_it_is_dropped() -> None:
    with stream_server("http", "a", last="b") as peer:
        client = LlamaClient(f"{HOST}:{peer.port}")
        assert "".join(map(str, client.stream("def"))) == "ab"
        (thread,) = [thread for thread in threading.enumerate() if thread.name == "triton-llama"]
        del client
        thread.join(20)
        assert not thread.is_alive()


@both_protocols
async def test_cancelling_a_task_ends_its_whole_list(protocol: Protocol) -> None:
    # For each request that has arrived, how to wait for its end.
    requests: SimpleQueue[Callable[[], bool]] = SimpleQueue()

    def over_http(connection: socket.socket) -> None:
        receive_request(connection)
        connection.settimeout(20)
        requests.put(lambda: connection.recv(1) == b"")

    def over_grpc(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        ended = threading.Event()
        context.add_callback(ended.set)
        requests.put(lambda: ended.wait(20))
        # Longer than the test waits: a request that this server ends hasn't been cancelled.
        assert ended.wait(100)
        yield response("", "stop")

    with server(over_http) if protocol == "http" else grpc_server(over_grpc) as port:
        async with AsyncLlamaClient(f"{HOST}:{port}", protocol) as client:
            task = asyncio.create_task(client.generate(["a", "b", "c"]))
            arrived = [await asyncio.to_thread(requests.get, timeout=20) for _ in range(3)]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert [await asyncio.to_thread(has_ended) for has_ended in arrived] == [True, True, True]


def test_a_failure_stops_the_sending_and_the_first_error_in_the_lists_order_is_raised() -> None:
    sent, third_has_failed = set(), threading.Event()

    def answer(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        sent.add(prompt := prompt_of(request))
        if prompt == "third":
            third_has_failed.set()
            context.abort(grpc.StatusCode.INTERNAL, prompt)
        assert third_has_failed.wait(20)
        if prompt == "second":
            context.abort(grpc.StatusCode.UNAVAILABLE, prompt)
        # Until both failures have been seen.
        time.sleep(0.2)
        yield response("", "stop")

    with (
        grpc_server(answer) as port,
        LlamaClient(f"{HOST}:{port}", "grpc", concurrency=3) as client,
        pytest.raises(OverloadedError, match="second") as error,
    ):
        client.generate(["first", "second", "third", "fourth"])
    assert error.value.prompt_index == 1
    assert sent == {"first", "second", "third"}


def test_kept_errors_are_in_their_positions_and_stop_nothing() -> None:
    def answer(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        if prompt_of(request) == "first":
            context.abort(grpc.StatusCode.INTERNAL, "first")
        yield response("", "stop")

    with grpc_server(answer) as port, LlamaClient(f"{HOST}:{port}", "grpc") as client:
        outcomes = client.generate(["first", "\ud800", "third"], return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServerError, RejectedInputError, Completion]
    assert [getattr(outcome, "prompt_index", None) for outcome in outcomes] == [0, 1, None]


def test_an_empty_list_and_one_with_an_unsendable_prompt_send_nothing() -> None:
    with LlamaClient("no-such-host.invalid") as client:
        assert client.generate([]) == []
        with pytest.raises(RejectedInputError) as error:
            client.generate(["a", "\ud800"])
    assert error.value.prompt_index == 1
