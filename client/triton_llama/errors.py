"""Every error a client raises.

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
`triton_llama.translate` maps status codes, messages and the libraries' exceptions to this tree.
"""


class TritonLlamaError(Exception):
    """Base of all errors of a request; `str()` of it is one line."""

    #: Position of the prompt in the list given to `generate`; None for a single prompt.
    prompt_index: int | None = None


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
