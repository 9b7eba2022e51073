"""A machine that vanishes: the connection to it ends, though nothing closes it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from threading import Thread

import pytest
from frontend.endpoints import HOST, endpoint, text_of
from frontend.fake_triton import FakeTriton


@contextmanager
def _forwarding(target: int) -> Iterator[tuple[int, Callable[[], None]]]:
    """Forward a port to another one; yield it, and a function that has the open connections pass nothing more on."""
    connections: set[socket.socket] = set()
    silent: set[socket.socket] = set()

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        connections.add(sink)
        with suppress(OSError):
            while received := source.recv(65536):
                if sink not in silent:
                    sink.sendall(received)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with socket.create_connection((HOST, target)) as server:
                answering = Thread(target=pass_on, args=(server, self.request))
                answering.start()
                pass_on(self.request, server)
                answering.join()

    with ThreadingTCPServer((HOST, 0), Handler) as forwarder:
        thread = Thread(target=forwarder.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield forwarder.server_address[1], lambda: silent.update(connections)
        finally:
            forwarder.shutdown()
            thread.join()
            for connection in connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)


@pytest.mark.long
def test_a_stream_to_a_silent_machine_goes_on_within_30_s(own: FakeTriton) -> None:
    own.hold_after = 2
    with _forwarding(own.port) as (port, silence), endpoint(port, resume_timeout=20) as served:

        def vanish() -> None:
            own.wait_for(lambda fake: fake.running == 1)
            silence()
            own.hold_after = None

        vanishing = Thread(target=vanish)
        vanishing.start()
        began = time.monotonic()
        assert text_of(served.complete()) == " Hello, world."
        assert 10 < time.monotonic() - began < 30
        vanishing.join()
