"""Triton's HTTP protocol as pure functions: which request to make, and what an answer means.

Tensors travel as binary data behind a JSON header; tritonclient encodes and decodes them. Sockets are the transports'
business.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

from triton_llama.completion import Completion
from triton_llama.endpoint import Endpoint
from triton_llama.errors import ServerError
from triton_llama.tensors import OUTPUT_NAMES, OutputTensors, PreparedRequest, read_completion
from triton_llama.translate import NOT_TRITON, from_http_response

_HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class HttpRequest:
    """One request; `path` includes the endpoint's base path."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | None = None


@dataclass(frozen=True)
class HttpResponse:
    """One complete answer; header names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def infer_request(endpoint: Endpoint, model: str, request: PreparedRequest) -> HttpRequest:
    """Encode an inference request."""
    inputs = []
    for tensor in request.tensors:
        wire = InferInput(tensor.name, list(tensor.values.shape), tensor.datatype)
        wire.set_data_from_numpy(tensor.values, binary_data=True)
        inputs.append(wire)
    outputs = [InferRequestedOutput(name, binary_data=True) for name in OUTPUT_NAMES]
    body, header_length = InferenceServerClient.generate_request_body(
        inputs, outputs=outputs, request_id=request.request_id
    )
    headers = {"Content-Type": "application/octet-stream", _HEADER_LENGTH: str(header_length)}
    return HttpRequest("POST", api_path(endpoint, "models", model, "infer"), headers, body)


def read_infer_response(response: HttpResponse, request: PreparedRequest) -> Completion:
    """Decode the answer to an inference request.

    Raises:
        TritonLlamaError: the answer is an error, or no answer of the contract.
    """
    if response.status != 200:
        raise from_http_response(response.status, response.body)
    header_length = response.headers.get(_HEADER_LENGTH.lower())
    try:
        outputs: OutputTensors = InferenceServerClient.parse_response_body(
            response.body, header_length=None if header_length is None else int(header_length)
        )
        return read_completion(outputs, request)
    except NOT_TRITON as error:
        raise ServerError(f"the answer is not one of Triton's inference protocol: {error}") from error


def refuses_decoupled(response: HttpResponse) -> bool:
    """Tell whether this is /infer's refusal of a streaming (decoupled) model, whatever the request; nothing was run."""
    return response.status == 501 and b"decoupled" in response.body


def live_request(endpoint: Endpoint) -> HttpRequest:
    """Ask whether the server is live: status 200 says yes."""
    return HttpRequest("GET", api_path(endpoint, "health", "live"))


def ready_request(endpoint: Endpoint) -> HttpRequest:
    """Ask whether the server is ready: status 200 says yes."""
    return HttpRequest("GET", api_path(endpoint, "health", "ready"))


def metadata_request(endpoint: Endpoint) -> HttpRequest:
    """Ask for the server's name and version."""
    return HttpRequest("GET", api_path(endpoint))


def model_ready_request(endpoint: Endpoint, model: str) -> HttpRequest:
    """Ask whether the model is ready: status 200 says yes."""
    return HttpRequest("GET", api_path(endpoint, "models", model, "ready"))


def config_request(endpoint: Endpoint, model: str) -> HttpRequest:
    """Ask for the model's live configuration."""
    return HttpRequest("GET", api_path(endpoint, "models", model, "config"))


def read_object(response: HttpResponse) -> Mapping[str, object]:
    """Decode an answer that is a JSON object.

    Raises:
        TritonLlamaError: it is an error, or no JSON object.
    """
    if response.status != 200:
        raise from_http_response(response.status, response.body)
    try:
        answer = json.loads(response.body)
    except ValueError as error:
        raise ServerError(f"the answer is not JSON: {response.body[:80]!r}") from error
    if not isinstance(answer, dict):
        raise ServerError(f"the answer is {str(answer)[:80]}, must be a JSON object")
    return answer


def api_path(endpoint: Endpoint, *parts: str) -> str:
    """Return the path of one of the API's addresses; the parts are quoted here."""
    return "/".join([endpoint.base_path, "v2", *(quote(part, safe="") for part in parts)])
