"""Servers that are missing, silent, slow or broken, connection reuse, and closed clients, on real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import grpc
import httpx
import pytest
from triton_llama import (
    AsyncLlamaClient,
    Completion,
    LlamaClient,
    LlamaConnectionError,
    LlamaTimeoutError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
)
from triton_llama.endpoint import Protocol
from tritonclient.grpc.service_pb2 import ModelInferRequest
from unit.grpc_peers import Responses, grpc_server, response
from unit.peers import HOST, hang_up, receive_request, respond, server, stay_silent
from unit.streaming import both_protocols, stream_server

Ask = Callable[..., Completion]
EMPTY = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def ask(
    address: str | int, protocol: Protocol = "http", *, timeout: float = 20.0, connect_timeout: float = 10.0
) -> Completion:
    url = address if isinstance(address, str) else f"{HOST}:{address}"
    with LlamaClient(url, protocol, timeout=timeout, connect_timeout=connect_timeout) as client:
        return client.generate("def")


def ask_async(
    address: str | int, protocol: Protocol = "http", *, timeout: float = 20.0, connect_timeout: float = 10.0
) -> Completion:
    url = address if isinstance(address, str) else f"{HOST}:{address}"

    async def run() -> Completion:
        async with AsyncLlamaClient(url, protocol, timeout=timeout, connect_timeout=connect_timeout) as client:
            return await client.generate("def")

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("ask", [ask, ask_async], ids=["sync", "async"])


def answering(answer: bytes, requests: list[bytes]) -> Callable[[socket.socket], None]:
    """Answer every request of a connection, and keep the requests."""

    def behave(connection: socket.socket) -> None:
        while request := receive_request(connection):
            requests.append(request)
            connection.sendall(answer)

    return behave


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
    assert "refused" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("url", "protocol"),
    [
        (None, "http"),
        (None, "grpc"),
        ("no-such-host.invalid:8000", "http"),
        ("no-such-host.invalid:8000", "grpc"),
        ("http://exämple-.com:8000", "http"),
        ("http://host:8000/a\x01b", "http"),
        (f"http://{'a' * 64}.com:8000", "http"),
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
        ("http", "timeout", r"no data from .* for 0\.3 s"),
        ("grpc", "timeout", r"within 0\.3 s"),
        # It never speaks gRPC.
        ("grpc", "connect_timeout", "no connection to"),
    ],
)
@both_clients
def test_a_silent_server_is_a_timeout(ask: Ask, protocol: Protocol, limit: str, message: str) -> None:
    with server(stay_silent) as port, pytest.raises(LlamaTimeoutError, match=message) as error:
        ask(port, protocol, **{limit: 0.3})
    assert error.value.__cause__ is not None


@both_clients
def test_a_connection_that_is_never_accepted_is_a_connect_timeout(ask: Ask) -> None:
    with socket.create_server((HOST, 0), backlog=0) as listener, ExitStack() as stack:
        # With a full queue of connections to accept, the system drops the next one's first packet.
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        with pytest.raises(LlamaTimeoutError, match=r"no connection to .* within 0\.3 s"):
            ask(listener.getsockname()[1], connect_timeout=0.3)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", LlamaConnectionError),
        (b"SSH-2.0-OpenSSH_9.2\r\n", LlamaConnectionError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", ServerError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", ServerError),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nInference-Header-Content-Length: x\r\n\r\n{}", ServerError),
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


def test_tensors_follow_the_json_in_requests_and_responses() -> None:
    outputs = [("text_output", "BYTES", b"\x02\0\0\0\xc3\xa9"), ("finish_reason", "BYTES", b"\x04\0\0\0stop")]
    outputs += [("num_input_tokens", "INT32", b"\x03\0\0\0"), ("num_output_tokens", "INT32", b"\x05\0\0\0")]
    listed = [
        {"name": name, "datatype": kind, "shape": [1, 1], "parameters": {"binary_data_size": len(content)}}
        for name, kind, content in outputs
    ]
    header = json.dumps({"outputs": listed}).encode()
    body = header + b"".join(content for _, _, content in outputs)
    head = f"HTTP/1.1 200 OK\r\nInference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    requests: list[bytes] = []
    with server(answering(head.encode() + body, requests)) as port:
        completion = ask(port)
    assert completion == Completion("é", "stop", 3, 5, completion.request_id, completion.seed)
    request_head, _, request_body = requests[0].partition(b"\r\n\r\n")
    lines = request_head.decode().lower().split("\r\n")
    assert lines[0] == "post /v2/models/llama/infer http/1.1"
    assert "accept-encoding: identity" in lines
    (length,) = [int(line.split(":")[1]) for line in lines if line.startswith("inference-header-content-length")]
    fields = json.loads(request_body[:length])
    assert fields["id"] == completion.request_id
    assert all(output["parameters"] == {"binary_data": True} for output in fields["outputs"])
    assert request_body[length:].startswith(b"\x03\0\0\0def")
    assert len(request_body) - length == sum(tensor["parameters"]["binary_data_size"] for tensor in fields["inputs"])


def test_a_response_in_json_alone_is_a_completion() -> None:
    values = {"text_output": ["é"], "finish_reason": [["stop"]], "num_input_tokens": [3], "num_output_tokens": [5]}
    outputs = [{"name": name, "datatype": "BYTES", "shape": [1, 1], "data": data} for name, data in values.items()]
    body = json.dumps({"outputs": outputs}).encode()
    with server(respond(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))) as port:
        completion = ask(port)
    assert completion == Completion("é", "stop", 3, 5, completion.request_id, completion.seed)


async def test_headers_are_sent_with_every_request() -> None:
    headers, requests = {"X-User": "Zoë"}, list[bytes]()
    answer = EMPTY.replace(b"\r\n", b"\r\nSet-Cookie: node=1; Path=/\r\n", 1)
    with server(answering(answer, requests)) as port:
        with LlamaClient(f"{HOST}:{port}", headers=headers) as client:
            for _ in range(2):
                with pytest.raises(ServerError):
                    client.generate("def")
        async with AsyncLlamaClient(f"{HOST}:{port}", headers=headers) as twin:
            for _ in range(2):
                with pytest.raises(ServerError):
                    await twin.generate("def")
    assert len(requests) == 4
    assert all(b"\r\nX-User: Zo\xc3\xab\r\n" in request for request in requests)
    assert not any(b"\r\ncookie:" in request.lower() for request in requests)


async def test_complete_streams_share_a_connection() -> None:
    """The server takes one connection at a time."""
    with stream_server("http", "a", last="b") as peer:
        with LlamaClient(f"{HOST}:{peer.port}") as client:
            assert ["".join(map(str, client.stream("def"))) for _ in range(3)] == ["ab"] * 3
        async with AsyncLlamaClient(f"{HOST}:{peer.port}") as twin:
            for _ in range(3):
                assert [chunk.text async for chunk in twin.stream("def")] == ["a", "b"]


def test_closing_a_grpc_client_ends_a_request_in_another_thread() -> None:
    waiting = threading.Event()

    def wait(connection: socket.socket) -> None:
        connection.recv(65536)
        waiting.set()

    with server(wait) as port, ThreadPoolExecutor(1) as threads:
        client = LlamaClient(f"{HOST}:{port}", "grpc", timeout=60.0, connect_timeout=60.0)
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


@both_protocols
async def test_cancelling_a_task_ends_its_whole_list(protocol: Protocol) -> None:
    with server(stay_silent) as port:
        async with AsyncLlamaClient(f"{HOST}:{port}", protocol, connect_timeout=60.0) as client:
            task = asyncio.create_task(client.generate(["a", "b", "c"]))
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


@both_protocols
def test_the_error_of_a_list_names_its_prompt(protocol: Protocol, dead_port: int) -> None:
    with LlamaClient(f"{HOST}:{dead_port}", protocol) as client:
        with pytest.raises(LlamaConnectionError) as error:
            client.generate(["a", "b"])
        assert error.value.prompt_index == 0
        outcomes = client.generate(["a", "b"], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [LlamaConnectionError, LlamaConnectionError]
        assert client.generate([]) == []


@both_protocols
async def test_returned_errors_are_in_the_places_of_their_prompts(protocol: Protocol, dead_port: int) -> None:
    prompts, kinds = ["a", "\ud800", "c"], [LlamaConnectionError, RejectedInputError, LlamaConnectionError]
    with LlamaClient(f"{HOST}:{dead_port}", protocol, concurrency=1) as client:
        errors = client.generate(prompts, return_exceptions=True)
    async with AsyncLlamaClient(f"{HOST}:{dead_port}", protocol, concurrency=1) as twin:
        async_errors = await twin.generate(prompts, return_exceptions=True)
    for outcomes in (errors, async_errors):
        assert [type(error) for error in outcomes] == kinds
        assert [error.prompt_index for error in outcomes if isinstance(error, TritonLlamaError)] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_list_has_no_more_requests_in_flight_than_concurrency(kind: str) -> None:
    lock, running, peaks = threading.Lock(), set[str](), list[int]()

    def answer(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        with lock:
            running.add(request.id)
            peaks.append(len(running))
        time.sleep(0.05)
        with lock:
            running.remove(request.id)
        yield response("a", "stop")

    with grpc_server(answer) as port:
        if kind == "sync":
            with LlamaClient(f"{HOST}:{port}", "grpc", concurrency=3) as client:
                client.generate(["def"] * 12)
        else:
            async with AsyncLlamaClient(f"{HOST}:{port}", "grpc", concurrency=3) as twin:
                await twin.generate(["def"] * 12)
    assert len(peaks) == 12
    assert max(peaks) == 3


def test_a_failure_stops_the_sending_of_prompts_that_wait() -> None:
    requests: list[bytes] = []
    with server(answering(EMPTY, requests)) as port, LlamaClient(f"{HOST}:{port}", concurrency=1) as client:
        with pytest.raises(ServerError) as error:
            client.generate(["def"] * 200)
        assert error.value.prompt_index == 0
    assert len(requests) < 200


async def test_a_failure_cancels_the_rest_of_an_async_list() -> None:
    requests: list[bytes] = []
    with server(answering(EMPTY, requests)) as port:
        async with AsyncLlamaClient(f"{HOST}:{port}", concurrency=1) as client:
            with pytest.raises(ServerError) as error:
                await client.generate(["def"] * 200)
    assert error.value.prompt_index == 0
    assert len(requests) < 200
