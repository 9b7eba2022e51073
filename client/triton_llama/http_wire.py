"""Triton's HTTP protocol without connections: which requests to send, and what the responses mean.

/infer carries tensors as binary data after a JSON header. Only /generate_stream takes a streaming (decoupled) model; it
carries JSON and answers with server-sent events. Numbers survive that: Triton reads 64-bit seeds as integers, and a
32-bit float is written with all digits of the double that equals it; only NaN and infinity have no JSON.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote

import httpx

from triton_llama.completion import Chunk, Completion
from triton_llama.endpoint import Endpoint
from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.sampling_params import INPUTS
from triton_llama.status import ServerStatus, read_status
from triton_llama.tensors import OUTPUT_NAMES, PreparedRequest, Tensor, Value, decode, read_chunk, read_completion
from triton_llama.translate import from_http_response, from_stream_error

_HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpRequest(NamedTuple):
    """One request, for `httpx.Client.build_request`."""

    method: str
    url: str
    headers: Mapping[str, str]
    content: bytes | None = None


def infer_request(endpoint: Endpoint, model: str, request: PreparedRequest) -> HttpRequest:
    """Encode a request for /infer, which gets one response."""
    contents = [tensor.encode() for tensor in request.tensors]
    inputs = [
        {
            "name": tensor.name,
            "shape": tensor.shape,
            "datatype": tensor.datatype,
            "parameters": {"binary_data_size": len(content)},
        }
        for tensor, content in zip(request.tensors, contents, strict=True)
    ]
    outputs = [{"name": name, "parameters": {"binary_data": True}} for name in OUTPUT_NAMES]
    header = json.dumps({"id": request.request_id, "inputs": inputs, "outputs": outputs}).encode()
    headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(len(header))}
    url = _url(endpoint, "models", model, "infer")
    return HttpRequest("POST", url, headers, b"".join([header, *contents]))


def read_infer_response(response: httpx.Response, request: PreparedRequest) -> Completion:
    """Decode a response of /infer.

    Raises:
        TritonLlamaError: it is an error, or violates the contract.
    """
    return read_completion(_outputs(response), request)


def status_requests(endpoint: Endpoint, model: str) -> list[HttpRequest]:
    """Return five questions about server and model."""
    paths = (("health", "live"), ("health", "ready"), ("models", model, "ready"), (), ("models", model, "config"))
    return [HttpRequest("GET", _url(endpoint, *path), {}) for path in paths]


def read_status_responses(endpoint: Endpoint, model: str, responses: Sequence[httpx.Response]) -> ServerStatus:
    """Decode the responses to `status_requests`, in their order."""
    live, ready, model_ready = (response.status_code == 200 for response in responses[:3])
    config = _object(responses[4]) if model_ready else None
    return read_status(endpoint, model, live, ready, _object(responses[3]), config)


def _outputs(response: httpx.Response) -> dict[str, object]:
    """Decode the outputs in a response of /infer, by name."""
    if response.status_code != 200:
        raise from_http_response(response.status_code, response.content)
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


def stream_request(endpoint: Endpoint, model: str, request: PreparedRequest) -> HttpRequest:
    """Encode a request that gets a stream of chunks.

    Raises:
        RejectedInputError: a number is not finite.
    """
    fields = {"id": request.request_id} | {tensor.name: _json_value(tensor) for tensor in request.tensors}
    headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
    content = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    return HttpRequest("POST", _url(endpoint, "models", model, "generate_stream"), headers, content)


def read_event(data: str, *, started: bool) -> Chunk:
    """Decode the data of one event of a stream; `started`: there was one before it.

    Raises:
        TritonLlamaError: it is an error, or violates the contract.
    """
    event = _json_object("event", data.encode())
    if "error" in event:
        raise from_stream_error(str(event["error"]), started=started)
    return read_chunk(event)


def _url(endpoint: Endpoint, *parts: str) -> str:
    scheme = "https" if endpoint.tls else "http"
    path = "/".join(["v2", *(quote(part, safe="") for part in parts)])
    return f"{scheme}://{endpoint.authority}{endpoint.base_path}/{path}"


def _only_value(data: object) -> object:
    """Return the element of an array in JSON, which may be flat or nested; raises ValueError if it has several."""
    while isinstance(data, list):
        (data,) = data
    return data


def _object(response: httpx.Response) -> Mapping[str, object]:
    if response.status_code != 200:
        raise from_http_response(response.status_code, response.content)
    return _json_object("answer", response.content)


def _json_value(tensor: Tensor) -> Value | list[Value]:
    for value in tensor.values:
        if isinstance(value, float) and not math.isfinite(value):
            raise RejectedInputError(f"{tensor.name} is {value}, must be finite: this request travels as JSON")
    _, is_list = INPUTS.get(tensor.name, ("", False))
    return list(tensor.values) if is_list else tensor.values[0]


def _json_object(what: str, data: bytes) -> Mapping[str, object]:
    try:
        value = json.loads(data)
    # JSON nested too deep is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the server sent an {what} that is not JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise ServerError(f"the server sent the {what} {data[:80]!r}, must be a JSON object")
    return value
