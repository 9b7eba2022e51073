"""The server's state, in memory and in a JSON file for probes.

    {"state": "starting" | "serving" | "draining" | "failed", "reason": "one line", "since": seconds since 1970,
     "pid": tritonserver's}

The file is replaced atomically. A file `<state file>.announced` beside it announces the shutdown: the preStop hook
creates it, and from then on the server isn't ready, though it goes on serving.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from triton_supervisor.settings import RefusedError

State = Literal["starting", "serving", "draining", "failed"]


@dataclass(frozen=True)
class Condition:
    """A state, why, and since when (seconds since 1970). pid: of the last tritonserver, 0 before the first one."""

    state: State
    reason: str
    since: float
    pid: int = 0


def announcement_file(state_file: Path) -> Path:
    """Return the file whose existence announces the shutdown."""
    return state_file.with_name(f"{state_file.name}.announced")


class StateFile:
    """The state in memory, and in a file if there is one."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        """Begin with "starting". path: None keeps it in memory only. say: takes a line if the file can't be written.

        Removes an earlier run's announcement. Raises RefusedError if the file can't be created.
        """
        self._path = path
        self._say = say
        self._behind = False
        self.condition = Condition("starting", "the model is being loaded", time.time())
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            announcement_file(path).unlink(missing_ok=True)
            self._write(path)
        except OSError as error:
            raise RefusedError(
                f"the state file {path} (TRITON_STATE_FILE) can't be written: {error.strerror}"
            ) from error

    def enter(self, state: State, reason: str, pid: int | None = None) -> None:
        """Change the state. A file that can't be written now doesn't stop the server: see `catch_up`.

        pid: tritonserver's, if it has changed.
        """
        before = self.condition
        if (state, reason) == (before.state, before.reason) and pid in (None, before.pid):
            return
        self.condition = Condition(state, reason, time.time(), before.pid if pid is None else pid)
        self._try_to_write()

    def catch_up(self) -> None:
        """Retry a failed write; call it often."""
        if self._behind:
            self._try_to_write()

    def announced(self) -> bool:
        """Return whether the shutdown is announced."""
        return self._path is not None and announcement_file(self._path).exists()

    def _try_to_write(self) -> None:
        """Write; report the first of consecutive failures."""
        if self._path is None:
            return
        try:
            self._write(self._path)
        except OSError as error:
            if not self._behind:
                self._say(f"the state file {self._path} can't be written any more: {error.strerror}")
            self._behind = True
        else:
            self._behind = False

    def _write(self, path: Path) -> None:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(json.dumps(asdict(self.condition)) + "\n")
            # mkstemp's mode is 0600; a probe may run as another user.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink(missing_ok=True)
            raise
