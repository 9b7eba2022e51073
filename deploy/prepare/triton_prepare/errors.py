"""What can go wrong while a checkpoint is prepared, one clear line each.

PrepareError
├── SourceError        no such checkpoint, or one that can't be prepared
├── HubError           the hub refuses, or can't be reached
├── PlaceError         the result can't be kept where it should be
├── MismatchError      what is there was prepared from something else, or was changed since
└── VerificationError  what was saved isn't what was quantized

Beside them the server's own refusals (`llama_engine.errors.EngineError`): it is its loading that is used.
"""


class PrepareError(Exception):
    """Base of all; `str()` is what the user reads."""


class SourceError(PrepareError):
    """There is no such checkpoint, or it is one that can't be prepared."""


class HubError(PrepareError):
    """The hub has no such thing, doesn't give it to us, or can't be reached."""


class PlaceError(PrepareError):
    """The result can't be kept where it should be: no room, no permission, or something else is there."""


class MismatchError(PrepareError):
    """What is there was prepared from something else, or was changed since."""


class VerificationError(PrepareError):
    """What was saved and loaded again isn't what was quantized."""


def first_line(error: BaseException) -> str:
    """Return an error's kind and the first line of what it says: other people's errors can be pages."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else repr(error)
