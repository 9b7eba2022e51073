"""Every error a client raises, and what becomes one: gRPC's exceptions, status codes and messages of Triton.

    TritonLlamaError
    ├── LlamaConnectionError     no connection, or it broke before the answer was complete
    ├── LlamaTimeoutError        no connection, or no answer, within the timeout
    ├── RejectedInputError       a value no tensor can hold, or the server's INVALID_ARG (HTTP 400)
    ├── OverloadedError          queue full (HTTP 503), queue timeout, server stopping, still loading or serving another
    │                            model; try later, or another server
    └── ServerError              INTERNAL (HTTP 500), and every other fault of the server
        ├── AccessDeniedError    HTTP 401 or 403: the server, or a proxy in front of it, denies access
        ├── ModelNotFoundError   the server doesn't serve that model
        └── DecoupledModelError  the model answers by streams alone; clients catch it and send a stream

The library's exception underneath, where there is one, is kept as `__cause__`. Wrong use of the Python API itself
(an unknown keyword, a malformed URL, a closed client) raises the usual TypeError, ValueError or RuntimeError instead.

A message of the model begins with a code (docs/api.md), which decides; `str()` of the error leaves it out. Messages of
Triton and gRPC have none, and a status often doesn't tell: over gRPC, UNAVAILABLE is both Triton's answer for a full
queue and gRPC's own for a missing connection, /generate_stream answers 400 to every error, and streams carry errors
without a status. There the words decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from triton_llama.address import ServerAddress

LOST = "LOST"
"""The code of an error by which the server, or its model's process, was lost."""
QUEUE_FULL = "QUEUE_FULL"
"""The code of a working server that has no room for another request; nothing was run."""
OTHER_MODEL = "OTHER_MODEL"
"""The code of a server whose model isn't the one that the request was prepared for; nothing was run."""
OTHER_ADAPTER = "OTHER_ADAPTER"
"""The code of a server whose LoRA adapter of that name has another version than the request's; nothing was run."""


class TritonLlamaError(Exception):
    """Base of all errors of a request; `str()` of it is one line."""

    code = ""
    """The model's code for the error, also of what Triton says in its own words; LOST; or empty."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code or self.code


class LlamaConnectionError(TritonLlamaError):
    """The server can't be reached, or the connection broke before the answer was complete."""

    code = LOST


class LlamaTimeoutError(TritonLlamaError):
    """The connection or the answer took longer than the timeout."""


class RejectedInputError(TritonLlamaError):
    """The request is at fault: the message names input, value and bound. Sending it again fails again."""

    @property
    def inputs(self) -> list[str]:
        """The inputs that the message begins with: `top_p is 2; ...`, `min_tokens, ignore_eos together ...`."""
        names: list[str] = []
        for word in str(self).split(" "):
            names.append(word.removesuffix(","))
            if not word.endswith(","):
                break
        return names


class OverloadedError(TritonLlamaError):
    """The server didn't run the request now: its queue is full or slow, it stops or loads, or the model changed."""


class ServerError(TritonLlamaError):
    """The server failed, or its answer violates the contract."""


class AccessDeniedError(ServerError):
    """The server, or a proxy in front of it, denies access: it needs a key, or another one."""


class ModelNotFoundError(ServerError):
    """The server doesn't have the model, or that version of it."""


class DecoupledModelError(ServerError):
    """The model answers by streams alone (the config `streaming`); nothing was run. The clients then send a stream."""


_HTTP_STATUS: dict[int, type[TritonLlamaError]] = {
    400: RejectedInputError,
    401: AccessDeniedError,
    403: AccessDeniedError,
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
    "UNAUTHENTICATED": AccessDeniedError,
    "PERMISSION_DENIED": AccessDeniedError,
}
# Triton's message for a model it doesn't have (404, NOT_FOUND; 400 in older versions). A gateway's 404 is another
# thing, so the message decides, not the status.
_NO_MODEL = "request for unknown model"
# With these additions Triton has the model, but it isn't loaded yet, or not any more: this is how a server drains. The
# status is that of a missing model or of a full queue, depending on version and protocol.
_NOT_LOADED = ("has no available versions", "is not at ready state")
MODEL_ERRORS: dict[str, type[TritonLlamaError]] = {
    "INVALID_ARG": RejectedInputError,
    "CONTEXT_LENGTH": RejectedInputError,
    "CANCELLED": ServerError,
    "UNAVAILABLE": OverloadedError,
    QUEUE_FULL: OverloadedError,
    OTHER_MODEL: OverloadedError,
    OTHER_ADAPTER: OverloadedError,
    "STOPPING": OverloadedError,
    "INTERNAL": ServerError,
}
"""The error of each code that a message of the model begins with."""

_WORDS: dict[str, tuple[str, type[TritonLlamaError] | None]] = {
    "maximum queue size": (QUEUE_FULL, OverloadedError),
    "request timeout expired": ("UNAVAILABLE", OverloadedError),
    "server is stopping": ("STOPPING", OverloadedError),
    "http2 header with status: 429": (LOST, OverloadedError),
    "http2 header with status: 503": (LOST, OverloadedError),
    "http2 header with status": (LOST, None),
    "stub process": (LOST, None),
}
"""Code and error of what Triton's messages say in lower case, and gRPC's of a proxy's answer; None: the status's."""
# What gRPC says, with another status than UNAVAILABLE, of a closed channel, of a request cut off while it was sent, and
# of a stream whose server a proxy has lost.
_BROKEN = ("Channel closed", "Internal error from Core", "RST_STREAM")


def is_interruption(error: TritonLlamaError) -> bool:
    """Return whether the server was lost, ends or still loads: the same request can be answered elsewhere, or later."""
    return error.code in (LOST, "STOPPING")


@contextmanager
def grpc_errors(server: ServerAddress, timeout: float) -> Iterator[None]:
    """Raise gRPC's exceptions in the block as TritonLlamaErrors.

    server and timeout, in seconds, are for the message.
    """
    try:
        yield
    except grpc.RpcError as error:
        # Every call raises a class that is a grpc.Call, too.
        details = error.details() or str(error.code())
        raise from_grpc_status(error.code().name, details, server, timeout) from error


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

    A request with chunks was accepted, so a later error of Triton isn't its fault.
    """
    server_failed = started or "stub process" in message.lower()
    return _from_message(ServerError if server_failed else RejectedInputError, message)


def from_grpc_status(status: str, details: str, server: ServerAddress, timeout: float) -> TritonLlamaError:
    """Return the error for a gRPC status, by its name, and its details."""
    if status == "DEADLINE_EXCEEDED":
        return LlamaTimeoutError(f"no complete answer from {server} within {timeout:g} s")
    if status == "INVALID_ARGUMENT" and not details.lower().startswith(_NO_MODEL):
        # The message may quote a value with any words.
        code, message = _split(one_line(details))
        return RejectedInputError(message, code)
    error = _from_message(_GRPC_STATUS.get(status, ServerError), details)
    broken = any(words in details for words in _BROKEN)
    if type(error) is not ServerError or not (status == "UNAVAILABLE" or broken):
        return error
    if "connection attempt timed out" in details:
        return LlamaTimeoutError(f"no connection to {server}: {error}", LOST)
    return LlamaConnectionError(f"no connection to {server}: {error}")


def _from_message(kind: type[TritonLlamaError], message: str) -> TritonLlamaError:
    """Return an error of this kind, unless the message says more than the status."""
    code, message = _split(one_line(message))
    if code:
        return MODEL_ERRORS[code](message, code)
    lowered = message.lower()
    if kind is DecoupledModelError and "decoupled" not in message:
        kind = ServerError
    for words, (code, its_kind) in _WORDS.items():
        if words in lowered:
            return (its_kind or kind)(message, code)
    if not lowered.startswith(_NO_MODEL):
        return kind(message)
    if any(words in message for words in _NOT_LOADED):
        return OverloadedError(f"the server is stopping, or still loading the model: {message}", "STOPPING")
    return ModelNotFoundError(message)


def _split(message: str) -> tuple[str, str]:
    """Return the code that a message of the model begins with, and the rest; for any other, an empty code."""
    code, separator, rest = message.partition(": ")
    return (code, rest) if separator and code in MODEL_ERRORS else ("", message)


def _http_message(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, LookupError, TypeError):
        # A gateway, or another server than Triton.
        return f"HTTP status {status}: {body[:200].decode('utf-8', errors='replace')}"


def one_line(text: str) -> str:
    """Return a message without its line breaks."""
    return " ".join(text.split())
