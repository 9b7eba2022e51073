"""The one place where other libraries' errors and status codes become this package's exceptions.

Quirks it knows: over gRPC, UNAVAILABLE is both what Triton answers when its queue is full and what gRPC itself says
when there is no connection, and only the text tells them apart; tritonclient hands over status codes as text; a
timeout comes as asyncio's, the socket's or a status, depending on who noticed first; /generate_stream answers 400 to
whatever the model answers with an error, a full queue included, so that there too only the text tells.
"""

from __future__ import annotations

import json
import os
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException

from tritonclient.utils import InferenceServerException

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

NOT_TRITON = (ValueError, LookupError, TypeError, AttributeError, struct.error, InferenceServerException)
"""What tritonclient, which checks nothing, raises when an answer isn't in the protocol."""

_HTTP_STATUS: dict[int, type[TritonLlamaError]] = {
    400: RejectedInputError,
    408: LlamaTimeoutError,
    413: RejectedInputError,
    429: OverloadedError,
    503: OverloadedError,
    504: LlamaTimeoutError,
}
_GRPC_STATUS: dict[str, type[TritonLlamaError]] = {
    "INVALID_ARGUMENT": RejectedInputError,
    "DEADLINE_EXCEEDED": LlamaTimeoutError,
    "RESOURCE_EXHAUSTED": OverloadedError,
    "UNAVAILABLE": OverloadedError,
}
# gRPC's own words for a connection that isn't there, from its core library.
_GRPC_NO_CONNECTION = (
    "failed to connect",
    "errors resolving",
    "dns resolution failed",
    "socket closed",
    "connection reset",
    "connection refused",
    "broken pipe",
    "goaway",
    "recvmsg",
    "sendmsg",
    "endpoint closing",
    "keepalive",
    "stream removed",
    "transport closed",
    "channel closed",
)
_GRPC_CONNECT_TIMEOUT = "connection attempt timed out"
# Triton's words for a model it doesn't have (404, NOT_FOUND; 400 in older versions). A gateway's 404 is something else,
# so the words decide and not the status.
_NO_MODEL = "request for unknown model"
# With these it has the model, and takes no requests for it: not yet, or not any more, which is how a server drains. The
# status is that of a missing model or that of a full queue, depending on version and protocol.
_NOT_LOADED = ("has no available versions", "is not at ready state")
# What is UNAVAILABLE where there is a status, in the words of Triton's queue and of this project's model; and what is
# nobody's fault but theirs. The model's own words are checked against its source by a test.
_OVERLOADED = (
    "maximum queue size",
    "request timeout expired",
    "server is stopping",
    "time was up before it got a slot",
)
_SERVERS_FAULT = (
    "stub process",
    "the server's log has the reason",
    "were not finite",
    "memory was exhausted",
    "the request was cancelled",
)


@contextmanager
def translated(endpoint: Endpoint, timeout: float, *network_errors: type[Exception]) -> Iterator[None]:
    """Translate what the block raises while it talks to `endpoint`; `timeout` in seconds is for the message.

    `network_errors` are the exceptions by which the library in use says that the connection failed, over and above
    the standard library's.
    """
    broken: tuple[type[Exception], ...] = (OSError, HTTPException, *network_errors)
    try:
        yield
    except TritonLlamaError:
        raise
    except InferenceServerException as error:
        raise from_inference_server_exception(error, endpoint, timeout) from error
    except TimeoutError as error:
        raise LlamaTimeoutError(f"no complete answer from {endpoint} within {timeout:g} s") from error
    except broken as error:
        raise LlamaConnectionError(f"no connection to {endpoint}: {_reason(error)}") from error


def connect_timeout_error(endpoint: Endpoint, connect_timeout: float) -> LlamaTimeoutError:
    """Return the error for a connection that wasn't made in time, in seconds."""
    return LlamaTimeoutError(f"no connection to {endpoint} within {connect_timeout:g} s")


def from_http_response(status: int, body: bytes) -> TritonLlamaError:
    """Return the error for an HTTP answer other than 200."""
    return _from_answer(_HTTP_STATUS.get(status, ServerError), _http_message(status, body))


def from_generate_response(status: int, body: bytes) -> TritonLlamaError:
    """Return the error for an answer of /generate_stream other than 200."""
    if status == 400:
        return from_stream_error(_http_message(status, body), started=False)
    return from_http_response(status, body)


def from_stream_error(message: str, *, started: bool) -> TritonLlamaError:
    """Return the error for an error message without a status, as streams have them; `started`: pieces came before.

    A request whose pieces have begun to come was accepted, so what ends it then is not its own fault.
    """
    lowered = message.lower()
    if any(words in lowered for words in _OVERLOADED):
        return OverloadedError(_one_line(message))
    server_failed = started or any(words in lowered for words in _SERVERS_FAULT)
    return _from_answer(ServerError if server_failed else RejectedInputError, _one_line(message))


def grpc_status(error: InferenceServerException) -> str:
    """Return the name of the gRPC status, without gRPC's prefix; empty if there is none."""
    return str(error.status() or "").removeprefix("StatusCode.")


def from_inference_server_exception(
    error: InferenceServerException, endpoint: Endpoint, timeout: float
) -> TritonLlamaError:
    """Return the error for a gRPC status, or for what tritonclient finds wrong itself (it then has no status)."""
    status = grpc_status(error)
    message = _one_line(str(error.message()))
    lowered = message.lower()
    if status == "DEADLINE_EXCEEDED":
        return LlamaTimeoutError(f"no complete answer from {endpoint} within {timeout:g} s")
    if status in ("UNAVAILABLE", "UNKNOWN", "CANCELLED", "INTERNAL"):
        if _GRPC_CONNECT_TIMEOUT in lowered:
            return LlamaTimeoutError(f"no connection to {endpoint} in time: {message}")
        if any(words in lowered for words in _GRPC_NO_CONNECTION):
            return LlamaConnectionError(f"no connection to {endpoint}: {message}")
    return _from_answer(_GRPC_STATUS.get(status, ServerError), message)


def _from_answer(kind: type[TritonLlamaError], message: str) -> TritonLlamaError:
    if not message.lower().startswith(_NO_MODEL):
        return kind(message)
    if any(words in message for words in _NOT_LOADED):
        return OverloadedError(f"the server is stopping, or still loading the model: {message}")
    return ModelNotFoundError(message)


def _http_message(status: int, body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        # Not Triton speaking: a gateway, or something that isn't a Triton at all.
        text = _one_line(body.decode("utf-8", errors="replace"))
        return f"HTTP status {status}: {text[:200]}" if text else f"HTTP status {status} without a message"
    if isinstance(answer, dict) and isinstance(answer.get("error"), str):
        return _one_line(answer["error"])
    return f"HTTP status {status}: {_one_line(str(answer))[:200]}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _reason(error: BaseException) -> str:
    # OpenSSL's errors have numbers of their own, which are no errno; aiohttp wraps them.
    wrapped = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(wrapped, ssl.SSLError):
        return _one_line(str(wrapped))
    # A positive errno names the plain reason; what asyncio and aiohttp make of it is longer and says less.
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return _one_line(str(error.strerror))
    return _one_line(str(error)) or type(error).__name__
