"""One keep-alive HTTP connection on the standard library's `http.client`, with a deadline for everything it does.

Knows neither Triton nor the pool that lends it out.
"""

from __future__ import annotations

import http.client
import selectors
import socket
import ssl
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from triton_llama.endpoint import Endpoint
from triton_llama.http_wire import HttpRequest, HttpResponse


@dataclass(frozen=True)
class HttpAnswer:
    """An answer whose body is still on its way; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    chunks: Generator[bytes, None, None]
    """The body as it comes. When this is exhausted, and only then, the connection is free again."""


def remaining(deadline: float) -> float:
    """Return the seconds until `deadline` (of time.monotonic).

    Raises:
        TimeoutError: there are none.
    """
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError("the time allowed is over")
    return seconds


class HttpConnection:
    """One connection, used by one thread at a time."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None) -> None:
        self._http = (
            http.client.HTTPConnection(endpoint.host, endpoint.port)
            if tls is None
            else http.client.HTTPSConnection(endpoint.host, endpoint.port, context=tls)
        )
        self._socket: socket.socket | None = None

    @property
    def is_open(self) -> bool:
        """False before `open`, after `close`, and after an answer that said so."""
        return self._socket is not None

    def is_stale(self) -> bool:
        """Tell whether the server has closed a connection that is idle: only then is there something to read."""
        if self._socket is None:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def open(self, timeout: float) -> None:
        """Connect within `timeout` seconds."""
        self._http.timeout = timeout
        self._http.connect()
        self._socket = self._http.sock

    def start(self, request: HttpRequest, headers: Mapping[str, str], deadline: float) -> HttpAnswer:
        """Send a request and wait for the head of its answer."""
        channel = self._opened()
        channel.settimeout(remaining(deadline))
        self._http.request(request.method, request.path, body=request.body, headers={**headers, **request.headers})
        channel.settimeout(remaining(deadline))
        response = self._http.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return HttpAnswer(response.status, names, self._body(response, channel, deadline))

    def exchange(self, request: HttpRequest, headers: Mapping[str, str], deadline: float) -> HttpResponse:
        """Send a request and wait for all of its answer."""
        answer = self.start(request, headers, deadline)
        return HttpResponse(answer.status, answer.headers, b"".join(answer.chunks))

    def abort(self) -> None:
        """Wake up the thread that waits on this connection; it sees the connection end."""
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The other side was quicker; the waiting thread sees the same end.
                return

    def close(self) -> None:
        """Close the connection; `open` makes a new one."""
        self._socket = None
        self._http.close()

    def _opened(self) -> socket.socket:
        if self._socket is None:
            raise RuntimeError("the connection must be open")
        return self._socket

    def _body(
        self, response: http.client.HTTPResponse, channel: socket.socket, deadline: float
    ) -> Generator[bytes, None, None]:
        with response:
            while True:
                channel.settimeout(remaining(deadline))
                chunk = response.read1(65536)
                if not chunk:
                    break
                yield chunk
            if response.length:
                raise http.client.IncompleteRead(b"", response.length)
            if response.will_close:
                self.close()
