"""Every error a client raises, and what becomes one: gRPC's exceptions, status codes and messages of Triton.

    TritonLlamaError
    ├── LlamaConnectionError     no connection, or it broke before the answer was complete
    ├── LlamaTimeoutError        no connection, or no answer, within the timeout
    ├── RejectedInputError       a value no tensor can hold, or the server's INVALID_ARG (HTTP 400)
    ├── OverloadedError          queue full (HTTP 503), queue timeout, server stopping or still loading; try later, or
    │                            another server
    └── ServerError              INTERNAL (HTTP 500), and every other fault of the server
        └── ModelNotFoundError   the server doesn't serve that model

The library's exception underneath, where there is one, is kept as `__cause__`. Wrong use of the Python API itself
(an unknown keyword, a malformed URL, a closed client) raises the usual TypeError, ValueError or RuntimeError instead.

Over gRPC, UNAVAILABLE is both Triton's answer for a full queue and gRPC's own for a missing connection, and only the
text tells them apart. /generate_stream answers 400 to every error of the model, a full queue included, and streams
carry errors without a status: there, too, only the text tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from triton_llama.endpoint import Endpoint


class TritonLlamaError(Exception):
    """Base of all errors of a request; `str()` of it is one line."""


class LlamaConnectionError(TritonLlamaError):
    """The server can't be reached, or the connection broke before the answer was complete."""


class LlamaTimeoutError(TritonLlamaError):
    """The connection or the answer took longer than the timeout."""


class RejectedInputError(TritonLlamaError):
    """The request is at fault: the message names input, value and bound. Sending it again fails again."""


class OverloadedError(TritonLlamaError):
    """The server takes no requests at present: queue full, queue timeout, stopping or loading."""


class ServerError(TritonLlamaError):
    """The server failed, or its answer violates the contract."""


class ModelNotFoundError(ServerError):
    """The server doesn't have the model, or that version of it."""


class DecoupledModelError(ServerError):
    """The model answers by streams alone (the config `streaming`); nothing was run. The clients then send a stream."""


_HTTP_STATUS: dict[int, type[TritonLlamaError]] = {
    400: RejectedInputError,
    413: RejectedInputError,
    429: OverloadedError,
    501: DecoupledModelError,
    503: OverloadedError,
    504: LlamaTimeoutError,
}
_GRPC_STATUS: dict[str, type[TritonLlamaError]] = {
    "INVALID_ARGUMENT": RejectedInputError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNIMPLEMENTED": DecoupledModelError,
}
# Triton's message for a model it doesn't have (404, NOT_FOUND; 400 in older versions). A gateway's 404 is another
# thing, so the message decides, not the status.
_NO_MODEL = "request for unknown model"
# With these additions Triton has the model, but it isn't loaded yet, or not any more: this is how a server drains. The
# status is that of a missing model or of a full queue, depending on version and protocol.
_NOT_LOADED = ("has no available versions", "is not at ready state")
# Messages of Triton's queue and of this project's model where there is no status, and gRPC's for a proxy's 429 or 503.
# A test checks the model's own against its source.
_OVERLOADED = re.compile(
    "maximum queue size|request timeout expired|server is stopping|time was up before it got a slot|too many guides|"
    "http2 header with status: (?:429|503)"
)
_SERVER_FAULT = re.compile(
    "stub process|the server's log has the reason|were not finite|memory was exhausted|the request was cancelled"
)

# What Triton, its Python backend, gRPC and this project's model say when a server or its model process is lost or ends.
_INTERRUPTED = re.compile(
    "no connection to|stub process|server is stopping|http2 header with status|stream ended without the finish_reason"
)
# What gRPC says, with another status than UNAVAILABLE, of a closed channel and of a request cut off while it was sent.
_BROKEN = re.compile("Channel closed|Internal error from Core")
_FULL = re.compile("maximum queue size|too many guides")


def is_interruption(error: TritonLlamaError) -> bool:
    """Return whether the server was lost, ends or still loads: the same request can be answered elsewhere, or later."""
    return not isinstance(error, RejectedInputError) and _INTERRUPTED.search(str(error).lower()) is not None


def is_full_queue(error: TritonLlamaError) -> bool:
    """Return whether a working server has no room for another request; nothing was run."""
    return isinstance(error, OverloadedError) and _FULL.search(str(error).lower()) is not None


@contextmanager
def grpc_errors(endpoint: Endpoint, timeout: float) -> Iterator[None]:
    """Raise gRPC's exceptions in the block as TritonLlamaErrors.

    endpoint and timeout, in seconds, are for the message.
    """
    try:
        yield
    except grpc.RpcError as error:
        # Every call raises a class that is a grpc.Call, too.
        raise from_grpc_status(error.code().name, error.details() or str(error.code()), endpoint, timeout) from error


def from_http_response(status: int, body: bytes) -> TritonLlamaError:
    """Return the error for an HTTP response other than 200."""
    return _from_message(_HTTP_STATUS.get(status, ServerError), _http_message(status, body))


def from_generate_response(status: int, body: bytes) -> TritonLlamaError:
    """Return the error for a response of /generate_stream other than 200."""
    # Triton's own errors come as JSON, the model's as an event.
    body = body.strip().removeprefix(b"data:")
    if status == 400:
        return from_stream_error(_http_message(status, body), started=False)
    return from_http_response(status, body)


def from_stream_error(message: str, *, started: bool) -> TritonLlamaError:
    """Return the error for a message without a status, as in streams; `started`: chunks came before it.

    A request with chunks was accepted, so a later error isn't its fault.
    """
    server_failed = started or _SERVER_FAULT.search(message.lower()) is not None
    return _from_message(ServerError if server_failed else RejectedInputError, message)


def from_grpc_status(status: str, details: str, endpoint: Endpoint, timeout: float) -> TritonLlamaError:
    """Return the error for a gRPC status, by its name, and its details."""
    if status == "DEADLINE_EXCEEDED":
        return LlamaTimeoutError(f"no complete answer from {endpoint} within {timeout:g} s")
    if status == "INVALID_ARGUMENT" and not details.lower().startswith(_NO_MODEL):
        # The message may quote a value with any words.
        return RejectedInputError(one_line(details))
    error = _from_message(_GRPC_STATUS.get(status, ServerError), details)
    if type(error) is not ServerError or not (status == "UNAVAILABLE" or _BROKEN.search(details)):
        return error
    kind = LlamaTimeoutError if "connection attempt timed out" in details else LlamaConnectionError
    return kind(f"no connection to {endpoint}: {error}")


def _from_message(kind: type[TritonLlamaError], message: str) -> TritonLlamaError:
    """Return an error of this kind, unless the message says more than the status."""
    message = one_line(message)
    lowered = message.lower()
    if _OVERLOADED.search(lowered):
        return OverloadedError(message)
    if kind is DecoupledModelError and "decoupled" not in message:
        return ServerError(message)
    if not lowered.startswith(_NO_MODEL):
        return kind(message)
    if any(words in message for words in _NOT_LOADED):
        return OverloadedError(f"the server is stopping, or still loading the model: {message}")
    return ModelNotFoundError(message)


def _http_message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        # A gateway, or another server than Triton.
        return f"HTTP status {status}: {body[:200].decode('utf-8', errors='replace')}"


def one_line(text: str) -> str:
    """Return a message without its line breaks."""
    return " ".join(text.split())
