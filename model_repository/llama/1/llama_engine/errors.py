"""What can go wrong, as types.

EngineError
├── InvalidSettings     the server's own configuration; the model refuses to load
├── CheckpointError     the checkpoint can't be served as asked; the model refuses to load
├── OutOfMemoryPlan     weights + cache + reserve exceed what is there; the model refuses to load
└── RequestError        one request fails, its neighbours don't
    ├── InvalidRequest  the client's fault: names the input, the value and the bound
    ├── Cancelled       the client doesn't want it any more
    ├── Unavailable     out of time before its turn, or the server stops: the same request may succeed elsewhere
    └── GenerationError      ours, while decoding: the client learns that it failed, the log learns why
"""


class EngineError(Exception):
    """Base of every error this package raises on purpose."""


class InvalidSettings(EngineError):
    """A setting is unknown, malformed or out of range."""


class CheckpointError(EngineError):
    """The checkpoint is missing a part, or has one this engine can't serve."""


class OutOfMemoryPlan(EngineError):
    """The memory plan doesn't fit the device."""


class RequestError(EngineError):
    """One request can't be answered; nothing else is touched."""


class InvalidRequest(RequestError):
    """The request breaks the contract. The message names the input, its value and the bound."""


class Cancelled(RequestError):
    """The client took the request back."""


class Unavailable(RequestError):
    """The request was accepted, and its turn didn't come in time."""


class GenerationError(RequestError):
    """Decoding this row failed through no fault of the client's."""


def one_line(error: Exception) -> str:
    """Return an error of a library's as one line: its type and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip() or repr(error)).splitlines()[0]}"
