"""The engine's log records in Triton's log."""

from __future__ import annotations

import logging
from collections.abc import Callable

Write = Callable[[str], object]


class TritonLogHandler(logging.Handler):
    """Passes log records on, each at Triton's nearest level."""

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
