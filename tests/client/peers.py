"""Servers for the client to meet: real sockets, and whatever behaviour a test gives them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

HOST = "127.0.0.1"


@contextmanager
def server(behave: Callable[[socket.socket], None], port: int = 0) -> Iterator[int]:
    """Serve connections one after the other, each by `behave`, which need not close it. port: 0 is any free one."""
    with ExitStack() as sockets, socket.create_server((HOST, port)) as listener:

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
    """Read, and hang up after ten seconds without an answer."""
    connection.settimeout(10.0)
    with suppress(TimeoutError):
        while connection.recv(65536):
            pass
    connection.shutdown(socket.SHUT_RDWR)


def hang_up(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.shutdown(socket.SHUT_RDWR)


def respond(answer: bytes) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(answer)
        connection.shutdown(socket.SHUT_RDWR)

    return behave


@contextmanager
def serve_page(text: Callable[[], str]) -> Iterator[str]:
    """Serve a page, made anew for every request; yield its address."""

    def behave(connection: socket.socket) -> None:
        body = text().encode()
        respond(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))(connection)

    with server(behave) as port:
        yield f"{HOST}:{port}"


def receive_request(connection: socket.socket) -> bytes:
    """Read a whole HTTP request, head and body; empty if the client has left."""
    received = b""
    while b"\r\n\r\n" not in received:
        if not (part := connection.recv(65536)):
            return b""
        received += part
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")]
    length = int(lengths[0]) if lengths else 0
    while len(body) < length:
        if not (part := connection.recv(65536)):
            return b""
        body += part
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
