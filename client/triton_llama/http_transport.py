"""HTTP transports on httpx: connections, deadlines, cancellation. `http_wire` has the requests and responses."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, closing, suppress
from http.cookiejar import CookieJar, DefaultCookiePolicy
from threading import Lock
from weakref import WeakSet

import httpcore
import httpx
from httpx_sse import EventSource

from triton_llama import http_wire
from triton_llama.completion import Piece
from triton_llama.endpoint import Endpoint
from triton_llama.http_wire import HttpRequest, PieceReader
from triton_llama.tensors import PreparedRequest
from triton_llama.translate import from_generate_response, http_errors

# As many connections as there are requests in flight; a request closes those that were idle for longer than this.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=15.0)


class _Transport:
    """Settings of both transports."""

    wire = http_wire

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        # Without this header, httpx asks Triton to compress each response.
        self._headers = httpx.Headers({"Accept-Encoding": "identity", **headers}, encoding="utf-8")
        # A jar that takes no cookies: requests don't depend on earlier responses.
        self._cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        # The system's certificates, which SSL_CERT_FILE replaces; httpx has its own.
        self._tls = ssl.create_default_context() if endpoint.tls else None
        self._closed = False

    def _errors(self, timeout: float) -> AbstractContextManager[None]:
        if self._closed:
            raise RuntimeError("the client is closed")
        return http_errors(self._endpoint, timeout, self._connect_timeout, lambda: self._closed)


class HttpTransport(_Transport):
    """Connections to one endpoint, for any thread."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint, connect_timeout, headers)
        self._network = _Network()
        transport = httpx.HTTPTransport(verify=False)
        # httpx has no parameter for the network backend of its pool, so the private attribute is replaced.
        if not hasattr(transport, "_pool"):
            raise RuntimeError(f"httpx {httpx.__version__} is not supported: HTTPTransport has no attribute _pool")
        transport._pool = httpcore.ConnectionPool(self._tls, max_connections=None, network_backend=self._network)
        self._client = httpx.Client(transport=transport, headers=self._headers, cookies=self._cookies, trust_env=False)

    def send(self, request: HttpRequest, timeout: float) -> httpx.Response:
        """Send one request and return its whole response, within `timeout` seconds."""
        with self._errors(timeout):
            return self._send(request, timeout, stream=False)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Piece, None, None]:
        """Send one request at the first `next` and yield its pieces, `timeout` seconds for all.

        Closing the generator closes the connection, which cancels the request on the server.
        """
        wire_request = http_wire.stream_request(self._endpoint, model, request)
        with self._errors(timeout), closing(self._send(wire_request, timeout, stream=True)) as response:
            if response.status_code != 200:
                body = b""
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > http_wire.LARGEST_ERROR:
                        break
                raise from_generate_response(response.status_code, body)
            reader = PieceReader(response)
            for event in EventSource(response).iter_sse():
                if event.data:
                    yield reader.piece(event.data)

    def close(self) -> None:
        """Close every connection; requests in flight in other threads end with a LlamaConnectionError."""
        self._closed = True
        self._network.abort()
        self._client.close()

    def _send(self, request: HttpRequest, timeout: float, *, stream: bool) -> httpx.Response:
        # Instants, and not durations: see _Stream.
        deadline = time.monotonic() + timeout
        connect = min(deadline, time.monotonic() + self._connect_timeout)
        timeouts = {"connect": connect, "read": deadline, "write": deadline}
        built = self._client.build_request(**request._asdict(), extensions={"timeout": timeouts})
        return self._client.send(built, stream=stream)


class AsyncHttpTransport(_Transport):
    """Connections to one endpoint, in the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint, connect_timeout, headers)
        self._client = httpx.AsyncClient(
            verify=self._tls or False,
            headers=self._headers,
            cookies=self._cookies,
            timeout=httpx.Timeout(None, connect=connect_timeout),
            limits=_LIMITS,
            trust_env=False,
        )

    async def send(self, request: HttpRequest, timeout: float) -> httpx.Response:
        """Send one request and return its whole response, within `timeout` seconds."""
        with self._errors(timeout):
            async with asyncio.timeout(timeout):
                return await self._send(request, stream=False)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Piece, None]:
        """Send one request at the first `anext` and yield its pieces, `timeout` seconds for all.

        Closing the generator closes the connection, which cancels the request on the server.
        """
        wire_request = http_wire.stream_request(self._endpoint, model, request)
        deadline = asyncio.get_running_loop().time() + timeout
        with self._errors(timeout):
            async with asyncio.timeout_at(deadline):
                response = await self._send(wire_request, stream=True)
            async with aclosing(response):
                if response.status_code != 200:
                    body = b""
                    async with asyncio.timeout_at(deadline):
                        async for chunk in response.aiter_bytes():
                            body += chunk
                            if len(body) > http_wire.LARGEST_ERROR:
                                break
                    raise from_generate_response(response.status_code, body)
                reader = PieceReader(response)
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    while True:
                        # Around each step: a timeout belongs to one task, and another one may take the next piece.
                        async with asyncio.timeout_at(deadline):
                            event = await anext(events, None)
                        if event is None:
                            break
                        if event.data:
                            yield reader.piece(event.data)

    async def close(self) -> None:
        """Close every connection; requests in flight in other tasks end with a LlamaConnectionError."""
        self._closed = True
        await self._client.aclose()

    async def _send(self, request: HttpRequest, *, stream: bool) -> httpx.Response:
        return await self._client.send(self._client.build_request(**request._asdict()), stream=stream)


class _Stream(httpcore.NetworkStream):
    """A connection whose `timeout` parameters are instants on `time.monotonic`.

    httpx takes a timeout for each read, fixed when the request is sent; a server that sends a little from time to time
    would never exceed it. httpcore passes the values through to here.
    """

    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _remaining(timeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _remaining(timeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        # The same object, so that `abort` finds the encrypted socket.
        self._stream = self._stream.start_tls(ssl_context, server_hostname, _remaining(timeout))
        return self

    def get_extra_info(self, info: str) -> object:
        return self._stream.get_extra_info(info)

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        """Wake the thread that waits on this connection; closing a socket doesn't."""
        # The server, or the waiting thread, may have closed it already.
        with suppress(OSError):
            connection: socket.socket = self._stream.get_extra_info("socket")
            connection.shutdown(socket.SHUT_RDWR)


class _Network(httpcore.SyncBackend):
    """Opens connections, and aborts all of them."""

    def __init__(self) -> None:
        # `abort` iterates over the streams while other threads add theirs.
        self._lock = Lock()
        self._streams: WeakSet[_Stream] = WeakSet()
        self._aborted = False

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        stream = _Stream(super().connect_tcp(host, port, _remaining(timeout), local_address, socket_options))
        with self._lock:
            self._streams.add(stream)
            aborted = self._aborted
        if aborted:
            stream.close()
            raise httpcore.ConnectError("the client was closed")
        return stream

    def abort(self) -> None:
        """End every connection, those in use by other threads and those being opened included."""
        with self._lock:
            self._aborted = True
            streams = list(self._streams)
        for stream in streams:
            stream.abort()


def _remaining(deadline: float | None) -> float:
    seconds = (deadline or 0.0) - time.monotonic()
    if seconds <= 0:
        raise httpcore.ReadTimeout("the deadline has passed")
    return seconds
