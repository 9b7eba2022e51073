"""The log of one server: its last lines in memory, all of them in a file if there is one, and on to whoever listens."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from triton_local.errors import InvalidSettingError

# Enough for any start; a server that runs for weeks must not fill the memory of the launcher.
_KEPT_LINES = 20_000


class ServerLog:
    """Takes lines from one thread, is read from any. Raises InvalidSettingError when `file` can't be written."""

    def __init__(self, file: Path | None, listener: Callable[[str], None] | None) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._lock = threading.Lock()
        self._listener = listener
        try:
            self._file = None if file is None else file.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise InvalidSettingError(f"log file {file} can't be written: {error.strerror}") from error

    def __enter__(self) -> "ServerLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def add(self, line: str) -> None:
        """Take one more line."""
        with self._lock:
            self._lines.append(line)
            self._write(line)
        if self._listener is not None:
            self._listener(line)

    def _write(self, line: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(line + "\n")
        except OSError as error:  # a full disk: serving goes on, and the log in memory says what happened
            full, self._file = self._file, None
            with contextlib.suppress(OSError):  # there is no place for what it still holds, either
                full.close()
            self._lines.append(f"triton_local: the log file can't be written any more: {error.strerror}")

    def lines(self) -> list[str]:
        """The last 20,000 lines, oldest first."""
        with self._lock:
            return list(self._lines)
