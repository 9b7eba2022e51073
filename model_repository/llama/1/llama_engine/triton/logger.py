"""The engine's log records in the log of the program that it runs in (Triton's).

Knows three ways to write a line, handed in by whoever loads the model, and nothing of what writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

Write = Callable[[str], object]


class TritonLogHandler(logging.Handler):
    """Passes log records on, each at the host's nearest level."""

    def __init__(self, info: Write, warning: Write, error: Write) -> None:
        super().__init__()
        self._info, self._warning, self._error = info, warning, error

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record."""
        message = f"llama: {self.format(record)}"
        if record.levelno >= logging.ERROR:
            self._error(message)
        elif record.levelno >= logging.WARNING:
            self._warning(message)
        else:
            self._info(message)
