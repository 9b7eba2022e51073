"""HTTP transports on httpx: connections, timeouts, cancellation. `http_wire` has the requests and responses."""

from __future__ import annotations

import ssl
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractContextManager, aclosing, closing
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TypedDict

import httpx
from httpx_sse import EventSource

from triton_llama import http_wire
from triton_llama.completion import Chunk, Completion
from triton_llama.endpoint import Endpoint
from triton_llama.http_wire import HttpRequest
from triton_llama.status import ServerStatus
from triton_llama.tensors import PreparedRequest
from triton_llama.translate import from_generate_response, http_errors

# As many connections as there are requests in flight; a request closes those that were idle for longer than this.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=15.0)


class _Options(TypedDict):
    """The arguments of both of httpx's clients."""

    verify: ssl.SSLContext | bool
    headers: httpx.Headers
    cookies: CookieJar
    limits: httpx.Limits
    trust_env: bool


class _Transport:
    """Settings of both transports."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._options = _Options(
            # The system's certificates, which SSL_CERT_FILE replaces; httpx has its own.
            verify=ssl.create_default_context() if endpoint.tls else False,
            # Without this header, httpx asks Triton to compress each response.
            headers=httpx.Headers({"Accept-Encoding": "identity", **headers}, encoding="utf-8"),
            # A jar that takes no cookies: requests don't depend on earlier responses.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=_LIMITS,
            trust_env=False,
        )
        self._closed = False

    def _timeout(self, seconds: float) -> httpx.Timeout:
        return httpx.Timeout(seconds, connect=min(seconds, self._connect_timeout))

    def _errors(self, timeout: float) -> AbstractContextManager[None]:
        if self._closed:
            raise RuntimeError("the client is closed")
        return http_errors(self._endpoint, timeout, self._connect_timeout, lambda: self._closed)


class HttpTransport(_Transport):
    """Connections to one endpoint, for any thread."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint, connect_timeout, headers)
        self._client = httpx.Client(**self._options)

    def send(self, request: HttpRequest, timeout: float) -> httpx.Response:
        """Send one request and return its whole response; no wait for its next bytes exceeds `timeout` seconds."""
        with self._errors(timeout):
            return self._send(request, timeout, stream=False)

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange."""
        wire_request = http_wire.infer_request(self._endpoint, model, request)
        return http_wire.read_infer_response(self.send(wire_request, timeout), request)

    def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        responses = [self.send(question, timeout) for question in http_wire.status_requests(self._endpoint, model)]
        return http_wire.read_status_responses(self._endpoint, model, responses)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Chunk, None, None]:
        """Send one request at the first `next` and yield its chunks, waiting `timeout` seconds for each at most.

        Closing the generator closes the connection, which cancels the request on the server.
        """
        wire_request = http_wire.stream_request(self._endpoint, model, request)
        with self._errors(timeout), closing(self._send(wire_request, timeout, stream=True)) as response:
            if response.status_code != 200:
                raise from_generate_response(response.status_code, response.read())
            started = False
            for event in EventSource(response).iter_sse():
                if event.data:
                    yield http_wire.read_event(event.data, started=started)
                    started = True

    def close(self) -> None:
        """Close every connection. A thread that waits for an answer goes on waiting: close after its request."""
        self._closed = True
        self._client.close()

    def _send(self, request: HttpRequest, timeout: float, *, stream: bool) -> httpx.Response:
        built = self._client.build_request(**request._asdict(), timeout=self._timeout(timeout))
        return self._client.send(built, stream=stream)


class AsyncHttpTransport(_Transport):
    """Connections to one endpoint, in the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(endpoint, connect_timeout, headers)
        self._client = httpx.AsyncClient(**self._options)

    async def send(self, request: HttpRequest, timeout: float) -> httpx.Response:
        """Send one request and return its whole response; no wait for its next bytes exceeds `timeout` seconds."""
        with self._errors(timeout):
            return await self._send(request, timeout, stream=False)

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange."""
        wire_request = http_wire.infer_request(self._endpoint, model, request)
        return http_wire.read_infer_response(await self.send(wire_request, timeout), request)

    async def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        responses = [
            await self.send(question, timeout) for question in http_wire.status_requests(self._endpoint, model)
        ]
        return http_wire.read_status_responses(self._endpoint, model, responses)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Chunk, None]:
        """Send one request at the first `anext` and yield its chunks, waiting `timeout` seconds for each at most.

        Closing the generator closes the connection, which cancels the request on the server.
        """
        wire_request = http_wire.stream_request(self._endpoint, model, request)
        with self._errors(timeout):
            async with aclosing(await self._send(wire_request, timeout, stream=True)) as response:
                if response.status_code != 200:
                    raise from_generate_response(response.status_code, await response.aread())
                started = False
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    async for event in events:
                        if event.data:
                            yield http_wire.read_event(event.data, started=started)
                            started = True

    async def close(self) -> None:
        """Close every connection; requests in flight in other tasks end with a LlamaConnectionError."""
        self._closed = True
        await self._client.aclose()

    async def _send(self, request: HttpRequest, timeout: float, *, stream: bool) -> httpx.Response:
        built = self._client.build_request(**request._asdict(), timeout=self._timeout(timeout))
        return await self._client.send(built, stream=stream)
