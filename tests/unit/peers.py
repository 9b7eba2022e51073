"""Servers for the client and the probe to meet, on real sockets: raw HTTP, Triton's gRPC service, Triton with a model.

Each does what a test tells it, broken answers and silence included; none runs a model.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from triton_llama.endpoint import Protocol
from triton_llama.health import Address
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

HOST = "127.0.0.1"

# --- Raw HTTP


@contextmanager
def server(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Serve connections one after the other, each by `behave`, which need not close it; yield the port."""
    with ExitStack() as sockets, socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                sockets.callback(connection.close)
                try:
                    behave(connection)
                except OSError:
                    # The client has left first, as it may.
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def stay_silent(connection: socket.socket) -> None:
    connection.recv(1)


def hang_up(connection: socket.socket) -> None:
    respond(b"")(connection)


def respond(answer: bytes) -> Callable[[socket.socket], None]:
    """Send these bytes, and then hang up."""

    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_RDWR)

    return behave


def http_answer(body: bytes, *headers: str) -> bytes:
    """A response of status 200."""
    return "\r\n".join(["HTTP/1.1 200 OK", *headers, f"Content-Length: {len(body)}\r\n\r\n"]).encode() + body


def receive_request(connection: socket.socket) -> bytes:
    """Read a whole HTTP request, head and body; empty if the client has left."""
    received = b""
    while b"\r\n\r\n" not in received:
        if not (part := connection.recv(65536)):
            return b""
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def send_head(connection: socket.socket, status: str = "200 OK", content_type: str = "text/event-stream") -> None:
    """Begin an answer in chunks."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head.encode())


def send_chunk(connection: socket.socket, chunk: bytes) -> None:
    """Send one chunk; an empty one ends the answer."""
    connection.sendall(b"%x\r\n%b\r\n" % (len(chunk), chunk))


def answer_with(
    *chunks: bytes, status: str = "200 OK", content_type: str = "text/event-stream"
) -> Callable[[socket.socket], None]:
    """Answer the first request with these chunks, whole."""

    def behave(connection: socket.socket) -> None:
        receive_request(connection)
        send_head(connection, status, content_type)
        for chunk in (*chunks, b""):
            send_chunk(connection, chunk)

    return behave


def event(text: str, reason: str = "", *, prompt_tokens: int = 0, tokens: int = 1) -> bytes:
    """A piece as Triton's event."""
    fields = {"text_output": text, "finish_reason": reason, "num_input_tokens": prompt_tokens}
    fields |= {"num_output_tokens": tokens, "model_name": "llama"}
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


# --- gRPC

Responses = Iterator[ModelStreamInferResponse]
Behaviour = Callable[[ModelInferRequest, grpc.ServicerContext], Responses]


class _Service(GRPCInferenceServiceServicer):  # type: ignore[misc] # generated, without types
    """Answers each request as the test says."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave

    def ModelStreamInfer(  # noqa: N802 - Triton's name
        self, request_iterator: Iterator[ModelInferRequest], context: grpc.ServicerContext
    ) -> Responses:
        (request,) = request_iterator
        yield from self._behave(request, context)

    def ModelInfer(  # noqa: N802 - Triton's name
        self, request: ModelInferRequest, context: grpc.ServicerContext
    ) -> ModelInferResponse:
        (response,) = self._behave(request, context)
        return response.infer_response


@contextmanager
def grpc_server(behave: Behaviour) -> Iterator[int]:
    """Serve Triton's gRPC protocol; yield the port."""
    service = grpc.server(ThreadPoolExecutor(16))
    add_GRPCInferenceServiceServicer_to_server(_Service(behave), service)
    port = service.add_insecure_port(f"{HOST}:0")
    service.start()
    try:
        yield port
    finally:
        service.stop(None).wait()


def response(text: str, reason: str = "", *, prompt_tokens: int = 0, tokens: int = 1) -> ModelStreamInferResponse:
    """A piece as Triton's gRPC response."""
    message = ModelStreamInferResponse()
    answer = message.infer_response
    for name, value in (
        ("text_output", text),
        ("finish_reason", reason),
        ("num_input_tokens", prompt_tokens),
        ("num_output_tokens", tokens),
    ):
        raw = value.encode() if isinstance(value, str) else value.to_bytes(4, "little")
        answer.outputs.add(name=name, datatype="BYTES" if isinstance(value, str) else "INT32", shape=[1, 1])
        answer.raw_output_contents.append(len(raw).to_bytes(4, "little") + raw if isinstance(value, str) else raw)
    return message


def saying(*responses: ModelStreamInferResponse) -> Behaviour:
    return lambda request, context: iter(responses)


def prompt_of(request: ModelInferRequest) -> str:
    return bytes(request.raw_input_contents[0][4:]).decode()


# --- Either protocol


@dataclass
class StreamServer:
    """A server that streams. begun: it has sent its pieces. left: the client has cancelled or closed."""

    port: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)


@contextmanager
def stream_server(protocol: Protocol, text: str, last: str | None = None) -> Iterator[StreamServer]:
    """Answer with a piece of this text; then with `last`, which ends the stream, or with nothing until `left`."""
    state = StreamServer()

    def over_http(connection: socket.socket) -> None:
        while receive_request(connection):
            send_head(connection)
            send_chunk(connection, event(text))
            state.begun.set()
            if last is None:
                try:
                    connection.recv(1)
                finally:
                    # Either the end of the connection or its reset.
                    state.left.set()
                return
            send_chunk(connection, event(last, "length", prompt_tokens=3, tokens=2))
            send_chunk(connection, b"")

    def over_grpc(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        context.add_callback(state.left.set)
        yield response(text)
        state.begun.set()
        if last is None:
            assert state.left.wait(20)
        else:
            yield response(last, "length", prompt_tokens=3, tokens=2)

    with server(over_http) if protocol == "http" else grpc_server(over_grpc) as port:
        state.port = port
        yield state


# --- Triton

DEAD = (
    400,
    "Failed to process the request(s) for model 'llama_0_0', message: Stub process 'llama_0_0' is not healthy.",
)
FULL = (503, "[request id: health] Exceeds maximum queue size")
NOT_LOADED = (400, "Request for unknown model: 'llama' has no available versions")

Answer = tuple[int, dict[str, object]]


@dataclass
class Instance:
    """What the metrics say of one process. last_step: seconds since 1970, 0 before the first one. rows: in slots."""

    last_step: float = 0.0
    rows: int = 0


@dataclass
class FakeTriton:
    """The state of a server, and what has come to it; `address` has the endpoint and the metrics.

    generate: what becomes of a request for text. ready: the status of each readiness endpoint. model: its name on the
    metrics page, clock: the page's Date; None sends none, as Triton does. asked: the bodies of the requests for text.
    """

    address: Address
    instances: dict[str, Instance] = field(default_factory=lambda: {"llama_0_0": Instance()})
    generate: Callable[[FakeTriton], Answer] = field(default=lambda triton: triton.token())
    ready: dict[str, int] = field(default_factory=lambda: {"/v2/health/ready": 200, "/v2/models/llama/ready": 200})
    model: str = "llama"
    clock: float | None = None
    asked: list[dict[str, object]] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def step(self, name: str = "llama_0_0", ago: float = 0.0) -> None:
        """Let an instance have made a step."""
        self.instances[name].last_step = time.time() - ago

    def token(self) -> Answer:
        """Compute one, as an idle server does."""
        self.step()
        outputs = {"text_output": " a", "finish_reason": "length", "num_input_tokens": 4, "num_output_tokens": 1}
        return 200, {"model_name": "llama", "model_version": "1", **outputs}

    def hang(self) -> Answer:
        """Answer when the test is over; it doesn't wait that long."""
        self.released.wait(60)
        return refusal(*DEAD)

    def page(self) -> str:
        """The metrics page, with something of Triton's own around what is the model's."""
        lines = ["# HELP nv_inference_count Number of inferences performed", 'nv_inference_count{model="llama"} 7']
        for name, unit in (("llama_last_step_timestamp_seconds", "last_step"), ("llama_slots_in_use", "rows")):
            lines += [f"# HELP {name} Something.", f"# TYPE {name} gauge"]
            for instance, state in self.instances.items():
                labels = f'model="{self.model}",model_instance="{instance}",version="1"'
                lines.append(f"{name}{{{labels}}} {getattr(state, unit):.16g}")
        return "\n".join([*lines, 'llama_steps_total{model="llama",version="1"} 12', ""])


def refusal(status: int, message: str) -> Answer:
    """An error, as Triton words it."""
    return status, {"error": message}


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    """Serve a Triton whose model is loaded and idle."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/metrics":
                self._send(200, triton.page().encode())
            else:
                self._send(triton.ready.get(self.path, 404), b"")

        def do_POST(self) -> None:
            assert self.path == "/v2/models/llama/generate"
            triton.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, answer = triton.generate(triton)
            self._send(status, json.dumps(answer).encode())

        def _send(self, status: int, body: bytes) -> None:
            try:
                self.send_response_only(status)
                if triton.clock is not None:
                    self.send_header("Date", formatdate(triton.clock, usegmt=True))
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
            except ConnectionError:
                # The client has disconnected.
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Keep the tests' output clean."""

    with ThreadingHTTPServer((HOST, 0), Handler) as service:
        # The end waits for the threads of the requests: none outlives a test.
        service.daemon_threads = False
        triton = FakeTriton(Address(HOST, service.server_port))
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield triton
        finally:
            triton.released.set()
            service.shutdown()
            thread.join()
