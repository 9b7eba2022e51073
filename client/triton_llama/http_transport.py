"""HTTP transports on httpx: Triton's requests and responses in JSON, and streams of server-sent events.

A streaming (decoupled) model takes /generate_stream and refuses /infer. Numbers survive JSON: Triton reads 64-bit seeds
as integers, and a 32-bit float is written with all digits of the double that equals it.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any
from urllib.parse import quote

import httpx
from httpx_sse import SSEError, aconnect_sse, connect_sse

from triton_llama.address import ServerAddress
from triton_llama.completion import Chunk, Completion
from triton_llama.errors import (
    LlamaConnectionError,
    LlamaTimeoutError,
    ServerError,
    from_generate_response,
    from_http_response,
    from_stream_error,
    one_line,
)
from triton_llama.outputs import read_chunk, read_completion
from triton_llama.sampling_params import INPUTS
from triton_llama.status import ServerStatus, read_status
from triton_llama.tensors import PreparedRequest

JsonObject = dict[str, object]


@contextmanager
def _http_errors(server: ServerAddress, timeout: float) -> Iterator[None]:
    """Translate httpx's exceptions; `timeout`, in seconds, is for the message."""
    try:
        yield
    except SSEError as error:
        raise ServerError(f"the answer is not a stream of events: {error}") from error
    except httpx.ConnectTimeout as error:
        raise LlamaTimeoutError(f"no connection to {server} in time") from error
    except httpx.TimeoutException as error:
        raise LlamaTimeoutError(f"no data from {server} for {timeout:g} s") from error
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise LlamaConnectionError(f"no connection to {server}: {one_line(str(error))}") from error


class _Transport:
    """Settings of both transports."""

    def __init__(self, server: ServerAddress, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._server = server
        self._connect_timeout = connect_timeout
        self._options: dict[str, Any] = {
            "base_url": f"{'https' if server.tls else 'http'}://{server.authority}{server.base_path}",
            # The system's certificates, which SSL_CERT_FILE replaces; httpx has its own.
            "verify": ssl.create_default_context() if server.tls else False,
            # Without this header, httpx asks Triton to compress each response.
            "headers": {"Accept-Encoding": "identity", **headers},
            # As many connections as there are requests in flight.
            "limits": httpx.Limits(keepalive_expiry=15.0),
            # The address is the address used, whatever proxy the environment names.
            "trust_env": False,
        }

    def _timeout(self, seconds: float) -> httpx.Timeout:
        return httpx.Timeout(seconds, connect=min(seconds, self._connect_timeout))


class HttpTransport(_Transport):
    """Connections to one server, for any thread."""

    def __init__(self, server: ServerAddress, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(server, connect_timeout, headers)
        self._client = httpx.Client(**self._options)

    def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange. timeout: seconds to wait for the next bytes.

        Raises DecoupledModelError if the model only streams, and the other errors of `errors`.
        """
        with _http_errors(self._server, timeout):
            path, body = _model_path(model, "infer"), _infer_body(request)
            response = self._client.post(path, json=body, timeout=self._timeout(timeout))
        return _read_completion(response, request)

    def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        with _http_errors(self._server, timeout):
            responses = [self._client.get(path, timeout=self._timeout(timeout)) for path in _status_paths(model)]
        return _read_status(self._server, model, responses)

    def stream(self, model: str, request: PreparedRequest, timeout: float) -> Generator[Chunk, None, None]:
        """Send one request at the first `next` and yield its chunks, waiting `timeout` seconds for each at most.

        Closing the generator closes the connection, which cancels the request on the server.
        """
        path, body = _model_path(model, "generate_stream"), _stream_body(request)
        with (
            _http_errors(self._server, timeout),
            connect_sse(self._client, "POST", path, json=body, timeout=self._timeout(timeout)) as source,
        ):
            if source.response.status_code != 200:
                raise from_generate_response(source.response.status_code, source.response.read())
            for number, event in enumerate(source.iter_sse()):
                yield _read_event(event.data, started=number > 0)

    def close(self) -> None:
        """Close every connection. A thread that waits for an answer goes on waiting: close after its request."""
        self._client.close()


class AsyncHttpTransport(_Transport):
    """Connections to one server, in the event loop of the first request."""

    def __init__(self, server: ServerAddress, connect_timeout: float, headers: Mapping[str, str]) -> None:
        super().__init__(server, connect_timeout, headers)
        self._client = httpx.AsyncClient(**self._options)

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion:
        """Complete a prompt in one exchange, as `HttpTransport.infer` does."""
        with _http_errors(self._server, timeout):
            path, body = _model_path(model, "infer"), _infer_body(request)
            response = await self._client.post(path, json=body, timeout=self._timeout(timeout))
        return _read_completion(response, request)

    async def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model."""
        with _http_errors(self._server, timeout):
            responses = [await self._client.get(path, timeout=self._timeout(timeout)) for path in _status_paths(model)]
        return _read_status(self._server, model, responses)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Chunk, None]:
        """Send one request at the first `anext` and yield its chunks, as `HttpTransport.stream` does."""
        path, body = _model_path(model, "generate_stream"), _stream_body(request)
        with _http_errors(self._server, timeout):
            async with aconnect_sse(self._client, "POST", path, json=body, timeout=self._timeout(timeout)) as source:
                if source.response.status_code != 200:
                    raise from_generate_response(source.response.status_code, await source.response.aread())
                started = False
                async with aclosing(source.aiter_sse()) as events:
                    async for event in events:
                        yield _read_event(event.data, started=started)
                        started = True

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()


def _model_path(model: str, action: str) -> str:
    return f"/v2/models/{quote(model, safe='')}/{action}"


def _status_paths(model: str) -> list[str]:
    model_paths = [_model_path(model, action) for action in ("ready", "config")]
    return ["/v2/health/live", "/v2/health/ready", "/v2", *model_paths]


def _infer_body(request: PreparedRequest) -> JsonObject:
    inputs = [
        {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype, "data": tensor.values}
        for tensor in request.tensors
    ]
    return {"id": request.request_id, "inputs": inputs, "outputs": [{"name": name} for name in request.outputs]}


def _stream_body(request: PreparedRequest) -> JsonObject:
    body: JsonObject = {"id": request.request_id}
    for tensor in request.tensors:
        _, is_list = INPUTS.get(tensor.name, ("", False))
        body[tensor.name] = tensor.values if is_list else tensor.values[0]
    return body


def _read_completion(response: httpx.Response, request: PreparedRequest) -> Completion:
    answer = _read_object(response)
    try:
        outputs = {output["name"]: list(output["data"]) for output in answer["outputs"]}  # type: ignore[attr-defined]
    except (LookupError, TypeError) as error:
        raise ServerError(f"the answer is not one of Triton's inference protocol: {error}") from error
    return read_completion(outputs, request.request_id, request.seed)


def _read_status(server: ServerAddress, model: str, responses: Sequence[httpx.Response]) -> ServerStatus:
    live, ready, metadata, model_ready, config = responses
    model_config = _read_object(config) if model_ready.is_success else None
    return read_status(server, model, live.is_success, ready.is_success, _read_object(metadata), model_config)


def _read_event(data: str, *, started: bool) -> Chunk:
    event = _read_json(data)
    if "error" in event:
        raise from_stream_error(str(event["error"]), started=started)
    return read_chunk({name: value if isinstance(value, list) else [value] for name, value in event.items()})


def _read_object(response: httpx.Response) -> JsonObject:
    if not response.is_success:
        raise from_http_response(response.status_code, response.content)
    return _read_json(response.content)


def _read_json(data: str | bytes) -> JsonObject:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ServerError(f"the server's answer {data[:80]!r} is not JSON") from error
    if not isinstance(value, dict):
        raise ServerError(f"the server's answer is {data[:80]!r}, must be a JSON object")
    return value
