"""Triton's /generate_stream as pure functions: the request in JSON, and the pieces in the events that answer it.

It takes what /infer takes, and a streaming (decoupled) model, which /infer refuses. Numbers survive JSON: Triton reads
64-bit seeds as integers, and a 32-bit float is written with all the digits of the double that equals it; only NaN and
infinity have no JSON. Sockets are the transports' business.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping

from triton_llama import http_wire
from triton_llama.endpoint import Endpoint
from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.http_wire import HttpRequest
from triton_llama.piece import Piece
from triton_llama.sse import EventReader
from triton_llama.tensors import PreparedRequest, Tensor
from triton_llama.translate import from_generate_response, from_stream_error

_EVENTS = "text/event-stream"
_LARGEST_ERROR = 65536
"""Bytes of an answer other than 200."""


def stream_request(endpoint: Endpoint, model: str, request: PreparedRequest) -> HttpRequest:
    """Encode a request.

    Raises:
        RejectedInputError: a number is not finite.
    """
    fields = {tensor.name: _json_value(tensor) for tensor in request.tensors}
    body = json.dumps({"id": request.request_id, **fields}, ensure_ascii=False, allow_nan=False).encode("utf-8")
    headers = {"Content-Type": "application/json", "Accept": _EVENTS}
    return HttpRequest("POST", http_wire.api_path(endpoint, "models", model, "generate_stream"), headers, body)


class PieceReader:
    """Reads one answer, chunk by chunk."""

    def __init__(self, status: int, headers: Mapping[str, str]) -> None:
        """Header names in lower case."""
        self._status = status
        self._content_type = headers.get("content-type", "")
        self._events = EventReader()
        self._started = False
        self._error_body = bytearray()

    def feed(self, chunk: bytes) -> Iterator[Piece]:
        """Yield the pieces that this chunk completes.

        Raises:
            TritonLlamaError: an error came in an event, or what came is none of the contract's events.
        """
        if self._status != 200:
            self._error_body += chunk
            if len(self._error_body) > _LARGEST_ERROR:
                self.end()
            return
        if not self._content_type.startswith(_EVENTS):
            raise ServerError(f"the answer's type is {self._content_type!r}, must be {_EVENTS}")
        for data in self._events.feed(chunk):
            yield self._piece(data)

    def end(self) -> None:
        """Take note that the answer is complete; whether its last piece has come is not checked here.

        Raises:
            TritonLlamaError: the answer is an error.
        """
        if self._status == 200:
            return
        body = bytes(self._error_body)
        if self._content_type.startswith(_EVENTS):
            body = next(self._events.feed(body), body)
        raise from_generate_response(self._status, body)

    def _piece(self, data: bytes) -> Piece:
        event = _read_event(data)
        if "error" in event:
            raise from_stream_error(str(event["error"]), started=self._started)
        self._started = True
        return Piece(
            text=_text(event, "text_output"),
            finish_reason=_text(event, "finish_reason"),
            num_input_tokens=_count(event, "num_input_tokens"),
            num_output_tokens=_count(event, "num_output_tokens"),
        )


def _json_value(tensor: Tensor) -> object:
    values = [value.decode("utf-8") if isinstance(value, bytes) else value for value in tensor.values[0].tolist()]
    for value in values:
        if isinstance(value, float) and not math.isfinite(value):
            raise RejectedInputError(f"{tensor.name} is {value}, must be finite: this request travels as JSON")
    return values if tensor.name in ("stop_words", "bad_words") else values[0]


def _read_event(data: bytes) -> Mapping[str, object]:
    try:
        event = json.loads(data)
    # A text nested too deep is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise ServerError(f"the server sent an event that is not JSON: {data[:80]!r}") from error
    if not isinstance(event, dict):
        raise ServerError(f"the server sent the event {data[:80]!r}, must be a JSON object")
    return event


def _text(event: Mapping[str, object], name: str) -> str:
    value = event.get(name)
    if not isinstance(value, str):
        raise ServerError(f"the server sent an event whose {name} is {str(value)[:80]!r}, must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ServerError(f"the server sent an event whose {name} has half a character at {error.start}") from error
    return value


def _count(event: Mapping[str, object], name: str) -> int:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ServerError(f"the server sent an event whose {name} is {str(value)[:80]!r}, must be an integer")
    return value
