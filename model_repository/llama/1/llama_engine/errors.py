"""Every exception this package raises on purpose.

EngineError
├── InvalidSettings        a setting is unknown, malformed or out of range; the model refuses to load
├── CheckpointError        the checkpoint is incomplete or unsupported; the model refuses to load
├── OutOfMemoryPlan        weights + cache + reserve exceed the device's memory; the model refuses to load
└── RequestError           one request fails; other requests are unaffected
    ├── InvalidRequest     the client's fault; the message names the input, its value and the bound
    │   └── ContextExceeded    prompt and completion don't fit into the context
    ├── Cancelled          the client cancelled the request
    ├── Unavailable        not served now: timed out in the queue, or one of those below; the client may retry
    │   ├── QueueFull      nothing was run; the client may retry later or elsewhere
    │   ├── OtherModel     prepared for another model; the client may prepare it again, or retry elsewhere
    │   ├── OtherAdapter   prepared for another version of its LoRA adapter; otherwise as OtherModel
    │   └── Stopping       the server is stopping; the client may retry elsewhere
    └── GenerationError    decoding failed; the client learns that it failed, the log has the reason

A client's message begins with the error's `code` (docs/api.md): a stream carries no status.
"""

from textwrap import shorten
from typing import ClassVar

MAX_LINE = 500
"""Maximum characters of an error of a library in a message or a log line; some have pages."""


class EngineError(Exception):
    """Base class of this package's errors."""


class InvalidSettings(EngineError):
    """A setting is unknown, malformed or out of range."""


class CheckpointError(EngineError):
    """The checkpoint is incomplete or has an unsupported feature.

    The message is one line of printable characters, because names in a checkpoint can have any.
    """

    def __init__(self, message: str) -> None:
        super().__init__("".join(character if character.isprintable() else " " for character in message))


class OutOfMemoryPlan(EngineError):
    """The memory plan exceeds the device's memory."""


class RequestError(EngineError):
    """One request fails; other requests are unaffected."""

    code: ClassVar[str] = "INTERNAL"


class InvalidRequest(RequestError):
    """The request violates the contract. The message names the input, its value and the bound.

    quoted: text of the request, between `message` and `rest`. The client gets the whole message; the log gets `logged`,
    which omits `quoted` because it can contain a prompt.
    """

    code = "INVALID_ARG"

    def __init__(self, message: str, quoted: str = "", rest: str = "") -> None:
        super().__init__(f"{message}{quoted}{rest}")
        self.logged = f"{message}{'...' if quoted else ''}{rest}"


class ContextExceeded(InvalidRequest):
    """Prompt and completion don't fit into the context."""

    code = "CONTEXT_LENGTH"


class Cancelled(RequestError):
    """The client cancelled the request."""

    code = "CANCELLED"


class Unavailable(RequestError):
    """The server can't serve the request now: it timed out in the queue, or as the subclass says."""

    code = "UNAVAILABLE"


class QueueFull(Unavailable):
    """The server has no room for the request."""

    code = "QUEUE_FULL"


class OtherModel(Unavailable):
    """The request was prepared by the description of another model."""

    code = "OTHER_MODEL"


class OtherAdapter(Unavailable):
    """The request was prepared for another version of its LoRA adapter."""

    code = "OTHER_ADAPTER"


class Stopping(Unavailable):
    """The server is stopping."""

    code = "STOPPING"

    def __init__(self) -> None:
        super().__init__("the server is stopping")


class GenerationError(RequestError):
    """Decoding failed on the server's side."""


def one_line(error: BaseException) -> str:
    """Return the error's type and its message, with its lines joined, in at most MAX_LINE characters."""
    return shorten(f"{type(error).__name__}: {str(error).strip() or repr(error)}", MAX_LINE, placeholder=" ...")
