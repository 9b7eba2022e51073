"""HTTP for the asyncio client, on aiohttp: the same requests and answers as `http_transport`, other sockets."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from triton_llama import http_wire
from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.generate_stream import PieceReader, stream_request
from triton_llama.http_wire import HttpRequest, HttpResponse
from triton_llama.joined import joined_async
from triton_llama.piece import Piece
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
        self._decoupled = False
        self._answers: set[aiohttp.ClientResponse] = set()

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Send one request and wait for its answer, at most `timeout` seconds."""
        if not self._decoupled:
            response = await self._exchange(http_wire.infer_request(self._endpoint, model, request), timeout)
            if not http_wire.refuses_decoupled(response):
                return http_wire.read_infer_response(response, request)
            # From now on, the way that takes every model. It isn't the first choice: it has no status for errors.
            self._decoupled = True
        return await joined_async(self.stream(model, request, timeout), request)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Piece, None]:
        """Send one request at the first `anext`, and yield the pieces of its answer; `timeout` seconds for all of it.

        Closing the generator closes the connection, and so cancels the request on the server.
        """
        async with self._answer(stream_request(self._endpoint, model, request), timeout) as response:
            reader = PieceReader(response.status, _lower_case(response.headers))
            async for chunk in response.content.iter_any():
                for piece in reader.feed(chunk):
                    yield piece
            reader.end()

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
        """Close every connection; requests in flight in other tasks end with a LlamaConnectionError."""
        self._closed = True
        if self._session is not None:
            await self._session.close()
        # aiohttp doesn't wake up who waits for more of a body whose connection it has closed.
        for answer in self._answers:
            answer.content.set_exception(aiohttp.ClientConnectionError("the client was closed"))

    async def _says_yes(self, request: HttpRequest, timeout: float) -> bool:
        return (await self._exchange(request, timeout)).status == 200

    async def _exchange(self, request: HttpRequest, timeout: float) -> HttpResponse:
        async with self._answer(request, timeout) as response:
            return HttpResponse(response.status, _lower_case(response.headers), await response.read())

    @asynccontextmanager
    async def _answer(self, request: HttpRequest, timeout: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and lend its answer, of which the head has come; what isn't read closes the connection."""
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
                    self._answers.add(response)
                    try:
                        yield response
                    finally:
                        self._answers.discard(response)
            except aiohttp.ConnectionTimeoutError as error:
                raise connect_timeout_error(self._endpoint, self._connect_timeout) from error

    def _open_session(self) -> aiohttp.ClientSession:
        # Not in __init__: a session belongs to the loop that is running when it is made.
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


def _lower_case(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}
