"""Every error a client raises.

    TritonLlamaError
    ├── LlamaConnectionError     no connection, or it broke before the answer
    ├── LlamaTimeoutError        no connection or no answer within the time allowed
    ├── RejectedInputError       a value no tensor can hold, or the server's INVALID_ARG (HTTP 400)
    ├── OverloadedError          queue full (HTTP 503), queue time over, server stopping or still loading; try later,
    │                            or another server
    └── ServerError              INTERNAL (HTTP 500) and everything else the server did wrong
        └── ModelNotFoundError   the server does not serve that model

The library's exception underneath, where there is one, is kept as `__cause__`. Wrong use of the Python API itself
(an unknown keyword, a malformed URL, a closed client) raises the usual TypeError, ValueError or RuntimeError instead.

This module knows no protocol and no status code; `translate` does.
"""


class TritonLlamaError(Exception):
    """Base of every error a request can end in; `str()` of it is one line."""

    #: Position of the prompt in the list given to `generate`; None for a single prompt.
    prompt_index: int | None = None


class LlamaConnectionError(TritonLlamaError):
    """The server can't be reached, or the connection broke before the answer was complete."""


class LlamaTimeoutError(TritonLlamaError):
    """The connection or the answer didn't come within the time allowed."""


class RejectedInputError(TritonLlamaError):
    """The request is at fault: it names the input, the value and the bound. Sending it again won't help."""


class OverloadedError(TritonLlamaError):
    """The server takes no requests just now: its queue is full, the time in it ran out, it is stopping or loading."""


class ServerError(TritonLlamaError):
    """The server failed, or its answer isn't one that the contract allows."""


class ModelNotFoundError(ServerError):
    """The server doesn't have the model, or not that version of it."""
