"""Where the messages of a chat come from: a terminal, with a prompt and line editing, or the lines of a pipe."""

from __future__ import annotations

import sys
from contextlib import suppress

from triton_llama.errors import RejectedInputError

_PROMPT = "> "


class Turns:
    """The messages on stdin."""

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        if self.interactive:
            # Line editing and history, in interpreters that have it.
            with suppress(ImportError):
                import readline  # noqa: F401

    def read(self) -> str | None:
        """Return the next message, stripped of white space around it, or None at the end; blank lines are skipped.

        Raises:
            RejectedInputError: a line isn't UTF-8.
        """
        while (line := self._line()) is not None:
            if line.strip():
                return line.strip()
        return None

    def _line(self) -> str | None:
        if self.interactive:
            # Not into a file or a pipe.
            return _typed(_PROMPT if sys.stdout.isatty() else "")
        raw = sys.stdin.buffer.readline()
        try:
            return raw.decode("utf-8") if raw else None
        except UnicodeDecodeError as error:
            raise RejectedInputError(f"a line of stdin is not UTF-8 at byte {error.start}") from error


def _typed(prompt: str) -> str | None:
    try:
        line = input(prompt)
        # What a terminal sends is whatever its user typed; Python keeps bytes that are no UTF-8 as surrogates.
        line.encode("utf-8")
    except EOFError:
        return None
    except UnicodeError as error:
        raise RejectedInputError("the line is not UTF-8") from error
    return line
