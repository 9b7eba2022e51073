"""The one place that maps exceptions, status codes and messages of httpx, gRPC and Triton to this package's errors.

Quirks: over gRPC, UNAVAILABLE is both Triton's answer for a full queue and gRPC's own for a missing connection, and
only the text tells them apart. /generate_stream answers 400 to every error of the model, a full queue included, and
streams carry errors without a status: there, too, only the text tells.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from triton_llama.endpoint import Endpoint
from triton_llama.errors import (
    LlamaConnectionError,
    LlamaTimeoutError,
    ModelNotFoundError,
    OverloadedError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
)


class DecoupledModelError(ServerError):
    """The model answers by streams alone (the config `streaming`); nothing was run. The clients ask it for one."""


_HTTP_STATUS: dict[int, type[TritonLlamaError]] = {
    400: RejectedInputError,
    408: LlamaTimeoutError,
    413: RejectedInputError,
    429: OverloadedError,
    501: DecoupledModelError,
    503: OverloadedError,
    504: LlamaTimeoutError,
}
_GRPC_STATUS: dict[str, type[TritonLlamaError]] = {
    "INVALID_ARGUMENT": RejectedInputError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": OverloadedError,
    "UNIMPLEMENTED": DecoupledModelError,
}
# gRPC's own messages for a missing connection, from its core library.
_GRPC_NO_CONNECTION = re.compile(
    "failed to connect|errors resolving|dns resolution failed|socket closed|connection reset|connection refused|"
    "broken pipe|goaway|recvmsg|sendmsg|endpoint closing|keepalive|stream removed|transport closed|channel closed"
)
_GRPC_CONNECT_TIMEOUT = "connection attempt timed out"
# Triton's message for a model it doesn't have (404, NOT_FOUND; 400 in older versions). A gateway's 404 is another
# thing, so the message decides, not the status.
_NO_MODEL = "request for unknown model"
# With these additions Triton has the model, but it isn't loaded yet, or not any more: this is how a server drains. The
# status is that of a missing model or of a full queue, depending on version and protocol.
_NOT_LOADED = ("has no available versions", "is not at ready state")
# Messages of Triton's queue and of this project's model where there is no status. A test checks the model's own against
# its source.
_OVERLOADED = re.compile(
    "maximum queue size|request timeout expired|server is stopping|time was up before it got a slot"
)
_SERVER_FAULT = re.compile(
    "stub process|the server's log has the reason|were not finite|memory was exhausted|the request was cancelled"
)


@contextmanager
def http_errors(
    endpoint: Endpoint, timeout: float, connect_timeout: float, is_closed: Callable[[], bool]
) -> Iterator[None]:
    """Translate httpx's exceptions; the timeouts, in seconds, and whether the client was closed are for messages."""
    import httpx
    from httpx_sse import SSEError

    try:
        yield
    except SSEError as error:
        raise ServerError(f"the answer is not a stream of events: {error}") from error
    except httpx.TimeoutException as error:
        if isinstance(error, httpx.ConnectTimeout) and connect_timeout < timeout:
            raise LlamaTimeoutError(f"no connection to {endpoint} within {connect_timeout:g} s") from error
        raise LlamaTimeoutError(f"no data from {endpoint} for {timeout:g} s") from error
    except (httpx.RequestError, httpx.InvalidURL, UnicodeError) as error:
        # The resolver raises UnicodeError for a host with a label of more than 63 bytes.
        reason = "the client was closed" if is_closed() else _reason(error)
        raise LlamaConnectionError(f"no connection to {endpoint}: {reason}") from error


@contextmanager
def grpc_errors(endpoint: Endpoint, timeout: float) -> Iterator[None]:
    """Translate gRPC's exceptions; `timeout`, in seconds, is for the message."""
    import grpc

    try:
        yield
    except grpc.RpcError as error:
        # Every call raises a class that is a grpc.Call, too.
        raise from_grpc_status(error.code().name, error.details() or str(error.code()), endpoint, timeout) from error


def from_http_response(status: int, body: bytes) -> TritonLlamaError:
    """Return the error for an HTTP response other than 200."""
    return _from_answer(_HTTP_STATUS.get(status, ServerError), _http_message(status, body))


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
    lowered = message.lower()
    if _OVERLOADED.search(lowered):
        return OverloadedError(_one_line(message))
    server_failed = started or _SERVER_FAULT.search(lowered) is not None
    return _from_answer(ServerError if server_failed else RejectedInputError, _one_line(message))


def from_grpc_status(status: str, details: str, endpoint: Endpoint, timeout: float) -> TritonLlamaError:
    """Return the error for a gRPC status, by its name, and its details."""
    message = _one_line(details)
    lowered = message.lower()
    if status == "DEADLINE_EXCEEDED":
        return LlamaTimeoutError(f"no complete answer from {endpoint} within {timeout:g} s")
    if status in ("UNAVAILABLE", "UNKNOWN", "CANCELLED", "INTERNAL"):
        if _GRPC_CONNECT_TIMEOUT in lowered:
            return LlamaTimeoutError(f"no connection to {endpoint} in time: {message}")
        if _GRPC_NO_CONNECTION.search(lowered):
            return LlamaConnectionError(f"no connection to {endpoint}: {message}")
    return _from_answer(_GRPC_STATUS.get(status, ServerError), message)


def _from_answer(kind: type[TritonLlamaError], message: str) -> TritonLlamaError:
    if kind is DecoupledModelError and "decoupled" not in message:
        return ServerError(message)
    if not message.lower().startswith(_NO_MODEL):
        return kind(message)
    if any(words in message for words in _NOT_LOADED):
        return OverloadedError(f"the server is stopping, or still loading the model: {message}")
    return ModelNotFoundError(message)


def _http_message(status: int, body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        # A gateway, or another server than Triton.
        text = _one_line(body.decode("utf-8", errors="replace"))
        return f"HTTP status {status}: {text[:200]}" if text else f"HTTP status {status} without a message"
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return _one_line(answer["error"])
    return f"HTTP status {status}: {_one_line(str(answer))[:200]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reason(error: BaseException) -> str:
    """Return the plain reason, from the operating system or OpenSSL if one of them is a cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return _one_line(str(cause))
        if isinstance(cause, OSError) and cause.errno is not None:
            # A negative errno is the resolver's.
            return _one_line(os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror))
        # asyncio tries every address of a host, and groups the failures.
        cause = cause.exceptions[0] if isinstance(cause, ExceptionGroup) else cause.__cause__ or cause.__context__
    return _one_line(str(error)) or type(error).__name__
