"""Commands and programs of README.md and docs/, unmodified, against a server on the ports that they name."""

from __future__ import annotations

import contextlib
import os
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from contract.code_blocks import ROOT, Block, page_blocks
from triton_local.server import LocalTriton

# A block that stands on two pages runs once.
CALLING = {block.text: block for block in page_blocks() if block.calls_a_server}.values()


@pytest.mark.parametrize(
    ("config", "block"),
    [("streaming" if block.streams else "triton", block) for block in CALLING],
    ids=[str(block) for block in CALLING],
)
def test_a_code_block_runs_unmodified(config: str, block: Block, request: pytest.FixtureRequest) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    # As if the virtual environment were activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with forwarded({8000: server.http_url, 8001: server.grpc_url, 8002: server.metrics_url}):
        run = subprocess.run(
            [*command, block.text],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert run.returncode == 0, f"{block.text}\n{run.stdout}\n{run.stderr}"
    assert run.stdout.strip(), f"{block.text}\nno output; stderr: {run.stderr}"
    assert '"error"' not in run.stdout


@contextmanager
def forwarded(ports: Mapping[int, str]) -> Iterator[None]:
    """Forward these ports of this machine, byte by byte, inside the block. ports: port → host:port of the server.

    Raises OSError where a port is in use.
    """
    with ExitStack() as listening:
        for port, address in ports.items():
            forwarder = listening.enter_context(_Forwarder(port, address))
            threading.Thread(target=forwarder.serve_forever, kwargs={"poll_interval": 0.05}).start()
            listening.callback(forwarder.shutdown)
        yield


class _Forwarder(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    # A client's open connection does not delay the end of the block.
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, address: str) -> None:
        super().__init__(("127.0.0.1", port), _Connection)
        host, its_port = address.split(":")
        self.there = (host, int(its_port))


class _Connection(socketserver.BaseRequestHandler):
    server: _Forwarder
    request: socket.socket

    def handle(self) -> None:
        with socket.create_connection(self.server.there) as there:
            back = threading.Thread(target=_copy, args=(there, self.request), daemon=True)
            back.start()
            _copy(self.request, there)
            back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    # After one side has gone, the other one sees the end of the stream.
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
