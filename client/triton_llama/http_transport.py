"""HTTP transport on httpx: connections, deadlines, requests, cancellation.

/infer carries tensors as binary data after a JSON header. Only /generate_stream takes a streaming (decoupled) model; it
carries JSON and answers with server-sent events. Numbers survive that: Triton reads 64-bit seeds as integers, and a
32-bit float is written with all digits of the double that equals it; only NaN and infinity have no JSON.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractContextManager, aclosing
from http.cookiejar import CookieJar, DefaultCookiePolicy
from urllib.parse import quote

import httpx
from httpx_sse import EventSource

from triton_llama.completion import Completion, Piece
from triton_llama.endpoint import Endpoint
from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.event_stream import EVENT_STREAM, PieceReader, check_response
from triton_llama.status import ServerStatus, read_status
from triton_llama.tensors import OUTPUT_NAMES, PreparedRequest, Tensor, Value, decode, read_completion
from triton_llama.translate import from_http_response, http_errors

_HEADER_LENGTH = "Inference-Header-Content-Length"
# As many connections as there are requests in flight; a request closes those that were idle for longer than this.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=15.0)


class HttpTransport:
    """Connections to one endpoint, in the event loop of the first request."""

    def __init__(self, endpoint: Endpoint, connect_timeout: float, headers: Mapping[str, str]) -> None:
        self._endpoint = endpoint
        self._connect_timeout = connect_timeout
        self._closed = False
        self._client = httpx.AsyncClient(
            # The system's certificates, which SSL_CERT_FILE replaces; httpx has its own.
            verify=ssl.create_default_context() if endpoint.tls else False,
            # Without this header, httpx asks Triton to compress each response.
            headers=httpx.Headers({"Accept-Encoding": "identity", **headers}, encoding="utf-8"),
            # A jar that takes no cookies: requests don't depend on earlier responses.
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            timeout=httpx.Timeout(None, connect=connect_timeout),
            limits=_LIMITS,
            trust_env=False,
        )

    async def infer(self, model: str, request: PreparedRequest, timeout: float) -> Completion | None:
        """Send one request and return its response, within `timeout` seconds; None if the model is decoupled."""
        headers, content = _infer_body(request)
        with self._errors(timeout):
            async with asyncio.timeout(timeout):
                response = await self._post(("models", model, "infer"), headers, content)
        if response.status_code == 501 and b"decoupled" in response.content:
            # Nothing was run.
            return None
        if response.status_code != 200:
            raise from_http_response(response.status_code, response.content)
        return read_completion(_outputs(response), request)

    async def stream(self, model: str, request: PreparedRequest, timeout: float) -> AsyncGenerator[Piece, None]:
        """Send one request at the first `anext` and yield its pieces, `timeout` seconds for all.

        Closing the generator closes the connection, which cancels the request on the server.
        """
        fields = {"id": request.request_id} | {tensor.name: _json_value(tensor) for tensor in request.tensors}
        content = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "Accept": EVENT_STREAM}
        deadline = asyncio.get_running_loop().time() + timeout
        with self._errors(timeout):
            async with asyncio.timeout_at(deadline):
                response = await self._post(("models", model, "generate_stream"), headers, content, stream=True)
            async with aclosing(response):
                reader = PieceReader(response)
                async with asyncio.timeout_at(deadline):
                    await check_response(response)
                async with aclosing(EventSource(response).aiter_sse()) as events:
                    while True:
                        # Around each step: a timeout belongs to one task, and another one may take the next piece.
                        async with asyncio.timeout_at(deadline):
                            event = await anext(events, None)
                        if event is None:
                            break
                        if (piece := reader.piece(event)) is not None:
                            yield piece

    async def status(self, model: str, timeout: float) -> ServerStatus:
        """Ask for the state of server and model, each question within `timeout` seconds."""
        questions = (
            ("health", "live"),
            ("health", "ready"),
            ("models", model, "ready"),
            (),
            ("models", model, "config"),
        )
        responses = []
        with self._errors(timeout):
            for path in questions:
                async with asyncio.timeout(timeout):
                    responses.append(await self._client.get(self._url(*path)))
        live, ready, model_ready = (response.status_code == 200 for response in responses[:3])
        config = _object(responses[4]) if model_ready else None
        return read_status(self._endpoint, model, live, ready, _object(responses[3]), model_ready, config)

    async def close(self) -> None:
        """Close every connection; requests in flight in other tasks end with a LlamaConnectionError."""
        self._closed = True
        await self._client.aclose()

    async def _post(
        self, path: tuple[str, ...], headers: Mapping[str, str], content: bytes, *, stream: bool = False
    ) -> httpx.Response:
        request = self._client.build_request("POST", self._url(*path), headers=headers, content=content)
        return await self._client.send(request, stream=stream)

    def _url(self, *parts: str) -> str:
        scheme = "https" if self._endpoint.tls else "http"
        path = "/".join(["v2", *(quote(part, safe="") for part in parts)])
        return f"{scheme}://{self._endpoint.authority}{self._endpoint.base_path}/{path}"

    def _errors(self, timeout: float) -> AbstractContextManager[None]:
        if self._closed:
            raise RuntimeError("the client is closed")
        return http_errors(self._endpoint, timeout, self._connect_timeout, lambda: self._closed)


def _infer_body(request: PreparedRequest) -> tuple[dict[str, str], bytes]:
    """Return headers and body of a request to /infer."""
    inputs, contents = [], []
    for tensor in request.tensors:
        content = tensor.encode()
        parameters = {"binary_data_size": len(content)}
        inputs.append(
            {"name": tensor.name, "shape": tensor.shape, "datatype": tensor.datatype, "parameters": parameters}
        )
        contents.append(content)
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in OUTPUT_NAMES]
    header = json.dumps({"id": request.request_id, "inputs": inputs, "outputs": outputs}).encode()
    headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
    return headers, b"".join([header, *contents])


def _outputs(response: httpx.Response) -> dict[str, object]:
    """Decode the response of /infer; raises ServerError if it isn't of Triton's protocol."""
    outputs: dict[str, object] = {}
    try:
        end = int(response.headers.get(_HEADER_LENGTH, len(response.content)))
        for output in json.loads(response.content[:end]).get("outputs", []):
            name = output["name"]
            if "data" in output:
                # A gateway may answer in JSON alone.
                outputs[name] = _only_value(output["data"])
                continue
            start, end = end, end + int(output["parameters"]["binary_data_size"])
            outputs[name] = decode(name, output["datatype"], output["shape"], response.content[start:end])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ServerError(f"the answer is not one of Triton's inference protocol: {error}") from error
    return outputs


def _only_value(data: object) -> object:
    """Return the element of an array in JSON, which may be flat or nested; raises ValueError if it has several."""
    while isinstance(data, list):
        (data,) = data
    return data


def _object(response: httpx.Response) -> Mapping[str, object]:
    if response.status_code != 200:
        raise from_http_response(response.status_code, response.content)
    try:
        answer = json.loads(response.content)
    except ValueError as error:
        raise ServerError(f"the answer is not JSON: {response.content[:80]!r}") from error
    if not isinstance(answer, dict):
        raise ServerError(f"the answer is {str(answer)[:80]}, must be a JSON object")
    return answer


def _json_value(tensor: Tensor) -> Value | list[Value]:
    for value in tensor.values:
        if isinstance(value, float) and not math.isfinite(value):
            raise RejectedInputError(f"{tensor.name} is {value}, must be finite: this request travels as JSON")
    return list(tensor.values) if tensor.name in ("stop_words", "bad_words") else tensor.values[0]
