"""HTTP for the asyncio client, on aiohttp: the same requests and answers as `http_transport`, other sockets."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp

from triton_llama import http_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.http_wire import HttpRequest, HttpResponse
from triton_llama.status import StatusAnswers
from triton_llama.tensors import PreparedRequest
from triton_llama.translate import connect_timeout_error, translated


class AsyncHttpTransport:
    """Connections to one endpoint, in the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._headers = dict(headers)
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        response = await self._exchange(http_wire.infer_request(self._endpoint, model, request), timeout)
        return http_wire.read_infer_response(response, request)

    async def status(self, model: str, timeout: float) -> StatusAnswers:
        """Ask what there is to know about the server and the model, each question within `timeout` seconds."""
        model_ready = await self._says_yes(http_wire.model_ready_request(self._endpoint, model), timeout)
        config = http_wire.config_request(self._endpoint, model)
        return StatusAnswers(
            live=await self._says_yes(http_wire.live_request(self._endpoint), timeout),
            ready=await self._says_yes(http_wire.ready_request(self._endpoint), timeout),
            metadata=http_wire.read_object(await self._exchange(http_wire.metadata_request(self._endpoint), timeout)),
            model_ready=model_ready,
            config=http_wire.read_object(await self._exchange(config, timeout)) if model_ready else None,
        )

    async def close(self) -> None:
        """Close every connection."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _says_yes(self, request: HttpRequest, timeout: float) -> bool:
        return (await self._exchange(request, timeout)).status == 200

    async def _exchange(self, request: HttpRequest, timeout: float) -> HttpResponse:
        if self._closed:
            raise RuntimeError("the client is closed")
        scheme = "https" if self._endpoint.tls else "http"
        url = f"{scheme}://{self._endpoint.authority}{request.path}"
        with translated(self._endpoint, timeout, aiohttp.ClientError):
            try:
                async with self._open_session().request(
                    request.method,
                    url,
                    data=request.body,
                    headers={**self._headers, **request.headers},
                    timeout=aiohttp.ClientTimeout(total=timeout, sock_connect=self._connect_timeout),
                ) as response:
                    body = await response.read()
                    names = {name.lower(): value for name, value in response.headers.items()}
                    return HttpResponse(response.status, names, body)
            except aiohttp.ConnectionTimeoutError as error:
                raise connect_timeout_error(self._endpoint, self._connect_timeout) from error

    def _open_session(self) -> aiohttp.ClientSession:
        # Not in __init__: a session belongs to the loop that is running when it is made.
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session
