"""A server on other ports than its own: what comes to them is passed on, byte by byte, until the block ends."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager


@contextmanager
def forwarded(ports: Mapping[int, str]) -> Iterator[None]:
    """Listen on these ports of this machine. ports: host:port of the server behind each of them.

    Raises OSError where a port is in use.
    """
    with ExitStack() as listening:
        for port, address in ports.items():
            forwarder = listening.enter_context(_Forwarder(port, address))
            threading.Thread(target=forwarder.serve_forever, kwargs={"poll_interval": 0.05}).start()
            listening.callback(forwarder.shutdown)
        yield


class _Forwarder(socketserver.ThreadingTCPServer):
    # A port that was used a moment ago is free.
    allow_reuse_address = True
    # A connection that somebody keeps open is nobody's to wait for.
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
            back = threading.Thread(target=_pass_on, args=(there, self.request), daemon=True)
            back.start()
            _pass_on(self.request, there)
            back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    # Where one side is gone there is nothing left to pass on, and the other side learns it from the end.
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
