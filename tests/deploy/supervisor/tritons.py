"""Servers that behave like Triton with the model in it, in whatever state a test puts them: real sockets, no model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from client.peers import HOST
from triton_supervisor.triton import Address

SECONDS = 60.0
"""Longest time that a request hangs; tests release it much sooner."""

DEAD = (
    400,
    "Failed to process the request(s) for model 'llama_0_0', message: Stub process 'llama_0_0' is not healthy.",
)
FULL = (503, "[request id: health] Exceeds maximum queue size")

Answer = tuple[int, dict[str, object]]


@dataclass
class Instance:
    """What the metrics say of one process. last_step: seconds since 1970, 0 before the first one."""

    last_step: float = 0.0


@dataclass
class FakeTriton:
    """The state of a server, and what has come to it.

    generate: what becomes of a request for text. asked: the bodies of the requests for text.
    """

    endpoint: Address
    metrics: Address
    instances: dict[str, Instance] = field(default_factory=lambda: {"llama_0_0": Instance()})
    generate: Callable[[FakeTriton], Answer] = field(default=lambda triton: triton.token())
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
        """Answer when the test is over, or never."""
        self.released.wait(SECONDS)
        return refusal(*DEAD)

    def page(self) -> str:
        """The metrics page, with something of Triton's own around what is the model's."""
        lines = ["# HELP nv_inference_count Number of inferences performed", 'nv_inference_count{model="llama"} 7']
        lines += [
            "# HELP llama_last_step_timestamp_seconds Something.",
            "# TYPE llama_last_step_timestamp_seconds gauge",
        ]
        for name, instance in self.instances.items():
            labels = f'model="llama",model_instance="{name}",version="1"'
            lines.append(f"llama_last_step_timestamp_seconds{{{labels}}} {instance.last_step:.16g}")
        return "\n".join([*lines, 'llama_steps_total{model="llama",version="1"} 12', ""])


def refusal(status: int, message: str) -> Answer:
    """An error, as Triton words it."""
    return status, {"error": message}


@contextmanager
def fake_triton() -> Iterator[FakeTriton]:
    """Serve on two ports that are two apart, as Triton's HTTP endpoint and its metrics are."""
    with ExitStack() as servers:
        http, metrics = servers.enter_context(_two_servers())
        triton = FakeTriton(Address(HOST, http.server_port), Address(HOST, metrics.server_port))
        http.triton = metrics.triton = triton
        for server in (http, metrics):
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
            thread.start()
            servers.callback(thread.join)
            servers.callback(server.shutdown)
        # First of all at the end: the servers wait for the requests that hang.
        servers.callback(triton.released.set)
        yield triton


class _Server(ThreadingHTTPServer):
    # Its end waits for the threads of its requests: none outlives a test.
    daemon_threads = False
    triton: FakeTriton


@contextmanager
def _two_servers() -> Iterator[tuple[_Server, _Server]]:
    while True:
        with _Server((HOST, 0), _Handler) as http:
            try:
                metrics = _Server((HOST, http.server_port + 2), _Handler)
            except (OSError, OverflowError):
                # The port is in use or out of range: try two others.
                continue
            with metrics:
                yield http, metrics
                return


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        triton = self.server.triton
        if self.path == "/metrics" and self.server.server_port == triton.metrics.port:
            self._send(200, triton.page().encode())
        else:
            self._send(404, b"")

    def do_POST(self) -> None:
        triton = self.server.triton
        assert self.path == "/v2/models/llama/generate"
        triton.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        status, answer = triton.generate(triton)
        self._send(status, json.dumps(answer).encode())

    def _send(self, status: int, body: bytes) -> None:
        try:
            # Triton sends no Date.
            self.send_response_only(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:
            # The client has disconnected.
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""
