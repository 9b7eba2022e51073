"""HTTP for the synchronous client: a pool of keep-alive connections that any thread may use.

On the standard library's `http.client` rather than on tritonclient's own HTTP client: that one belongs to the thread
that made it (greenlets), so it can neither be shared by threads nor closed by another one.
"""

from __future__ import annotations

import errno
import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from threading import Lock

from triton_llama import http_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.generate_stream import PieceReader, stream_request
from triton_llama.http_connection import HttpConnection, remaining
from triton_llama.http_wire import HttpRequest, HttpResponse
from triton_llama.joined import joined
from triton_llama.piece import Piece
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
        self._idle: list[HttpConnection] = []
        self._busy: set[HttpConnection] = set()
        self._closed = False
        self._decoupled = False

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        if not self._decoupled:
            response = self._exchange(http_wire.infer_request(self._endpoint, model, request), timeout)
            if not http_wire.refuses_decoupled(response):
                return http_wire.read_infer_response(response, request)
            # From now on, the way that takes every model. It isn't the first choice: it has no status for errors.
            self._decoupled = True
        return joined(self.stream(model, request, timeout), request)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Piece, None, None]:
        """Send one request at the first `next`, and yield the pieces of its answer; `timeout` seconds for all of it.

        Closing the generator closes the connection, and so cancels the request on the server.
        """
        deadline = time.monotonic() + timeout
        wire_request = stream_request(self._endpoint, model, request)
        with translated(self._endpoint, timeout), self._connected(deadline) as connection:
            answer = connection.start(wire_request, self._headers, deadline)
            reader = PieceReader(answer.status, answer.headers)
            with closing(answer.chunks):
                for chunk in answer.chunks:
                    yield from reader.feed(chunk)
            reader.end()

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
        with translated(self._endpoint, timeout), self._connected(deadline) as connection:
            return connection.exchange(request, self._headers, deadline)

    @contextmanager
    def _connected(self, deadline: float) -> Iterator[HttpConnection]:
        """Lend an open connection; if the block is left by an exception, it isn't used again."""
        connection = self._take()
        try:
            if not connection.is_open:
                self._open(connection, deadline)
            yield connection
        except BaseException:
            connection.close()
            raise
        finally:
            self._give_back(connection)

    def _take(self) -> HttpConnection:
        with self._lock:
            if self._closed:
                raise RuntimeError("the client is closed")
            connection = self._idle.pop() if self._idle else HttpConnection(self._endpoint, self._tls)
            self._busy.add(connection)
        if connection.is_open and connection.is_stale():
            connection.close()
        return connection

    def _give_back(self, connection: HttpConnection) -> None:
        with self._lock:
            self._busy.discard(connection)
            if connection.is_open and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _open(self, connection: HttpConnection, deadline: float) -> None:
        seconds = remaining(deadline)
        try:
            connection.open(min(self._connect_timeout, seconds))
        except TimeoutError as error:
            if self._connect_timeout < seconds:
                raise connect_timeout_error(self._endpoint, self._connect_timeout) from error
            raise
        if self._closed:
            # `close` found nothing to abort yet.
            raise ConnectionAbortedError(errno.ECONNABORTED, "the client was closed")
