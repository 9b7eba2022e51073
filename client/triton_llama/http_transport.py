"""HTTP for the synchronous client: a pool of keep-alive connections that any thread may use.

On the standard library's `http.client` rather than on tritonclient's own HTTP client: that one belongs to the thread
that made it (greenlets), so it can neither be shared by threads nor closed by another one.
"""

from __future__ import annotations

import errno
import http.client
import selectors
import socket
import ssl
import time
from collections.abc import Mapping
from threading import Lock

from triton_llama import http_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.http_wire import HttpRequest, HttpResponse
from triton_llama.status import StatusAnswers
from triton_llama.tensors import PreparedRequest
from triton_llama.translate import connect_timeout_error, translated


class HttpTransport:
    """Connections to one endpoint; as many as there are requests in flight."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._headers = dict(headers)
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self._lock = Lock()
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._closed = False

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        response = self._exchange(http_wire.infer_request(self._endpoint, model, request), timeout)
        return http_wire.read_infer_response(response, request)

    def status(self, model: str, timeout: float) -> StatusAnswers:
        """Ask what there is to know about the server and the model, each question within `timeout` seconds."""
        model_ready = self._says_yes(http_wire.model_ready_request(self._endpoint, model), timeout)
        config = http_wire.config_request(self._endpoint, model)
        return StatusAnswers(
            live=self._says_yes(http_wire.live_request(self._endpoint), timeout),
            ready=self._says_yes(http_wire.ready_request(self._endpoint), timeout),
            metadata=http_wire.read_object(self._exchange(http_wire.metadata_request(self._endpoint), timeout)),
            model_ready=model_ready,
            config=http_wire.read_object(self._exchange(config, timeout)) if model_ready else None,
        )

    def close(self) -> None:
        """Close every connection; requests in flight in other threads end with a LlamaConnectionError."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.abort()
        for connection in idle:
            connection.close()

    def _says_yes(self, request: HttpRequest, timeout: float) -> bool:
        return self._exchange(request, timeout).status == 200

    def _exchange(self, request: HttpRequest, timeout: float) -> HttpResponse:
        deadline = time.monotonic() + timeout
        with translated(self._endpoint, timeout):
            connection = self._take()
            try:
                if not connection.is_open:
                    self._open(connection, deadline)
                response = connection.exchange(request, self._headers, deadline)
            except BaseException:
                connection.close()
                raise
            finally:
                self._give_back(connection)
        return response

    def _take(self) -> _Connection:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            connection = self._idle.pop() if self._idle else _Connection(self._endpoint, self._tls)
            self._busy.add(connection)
        if connection.is_open and connection.is_stale():
            connection.close()
        return connection

    def _give_back(self, connection: _Connection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if connection.is_open and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _open(self, connection: _Connection, deadline: float) -> None:
        remaining = _remaining(deadline)
        try:
            connection.open(min(self._connect_timeout, remaining))
        except TimeoutError as error:
            if self._connect_timeout < remaining:
                raise connect_timeout_error(self._endpoint, self._connect_timeout) from error
            raise
        if self._closed:
            # `close` found nothing to abort yet.
            raise ConnectionAbortedError(errno.ECONNABORTED, "the client was closed")


class _Connection:
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
        return self._socket is not None

    def is_stale(self) -> bool:
        """Tell whether the server has closed a connection that is idle: only then is there something to read."""
        if self._socket is None:
            return False
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)
            return bool(selector.select(0))

    def open(self, timeout: float) -> None:
        self._http.timeout = timeout
        self._http.connect()
        self._socket = self._http.sock

    def exchange(self, request: HttpRequest, headers: Mapping[str, str], deadline: float) -> HttpResponse:
        if self._socket is None:
            raise RuntimeError("the connection must be open")
        self._socket.settimeout(_remaining(deadline))
        self._http.request(request.method, request.path, body=request.body, headers={**headers, **request.headers})
        self._socket.settimeout(_remaining(deadline))
        with self._http.getresponse() as response:
            chunks = []
            while True:
                self._socket.settimeout(_remaining(deadline))
                chunk = response.read1(65536)
                if not chunk:
                    break
                chunks.append(chunk)
            if response.length:
                raise http.client.IncompleteRead(b"".join(chunks), response.length)
            names = {name.lower(): value for name, value in response.getheaders()}
            answer = HttpResponse(response.status, names, b"".join(chunks))
            if response.will_close:
                self.close()
            return answer

    def abort(self) -> None:
        """Wake up the thread that waits on this connection; it sees the connection end."""
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The other side was quicker; the waiting thread sees the same end.
                return

    def close(self) -> None:
        self._socket = None
        self._http.close()


def _remaining(deadline: float) -> float:
    remaining = deadline - time.monotonic()
    if remaining <= 0:
        raise TimeoutError("the time allowed is over")
    return remaining
