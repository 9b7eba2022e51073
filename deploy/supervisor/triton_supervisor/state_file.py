"""The state of the server for whoever can't ask it: a JSON file that probes read, whole or not at all.

    {"state": "starting" | "serving" | "draining" | "failed", "reason": "one line", "since": seconds since 1970}

A file `<state file>.announced` beside it says that the end is near: the preStop hook makes it, and from then on the
server isn't ready, though it goes on serving.
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
    """A state, why, and since when (seconds since 1970)."""

    state: State
    reason: str
    since: float


def announcement_file(state_file: Path) -> Path:
    """Return the file whose existence announces the end."""
    return state_file.with_name(f"{state_file.name}.announced")


class StateFile:
    """The state, in a file if there is one, and in memory."""

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        """Begin with "starting". path: None keeps it in memory alone. say: takes a line if the file can't be written.

        An announcement that an earlier run left is removed. Raises RefusedError when the place can't be used.
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

    def enter(self, state: State, reason: str) -> None:
        """Take on a state. That the file can't be written now is no reason to stop serving: see `catch_up`."""
        if (state, reason) == (self.condition.state, self.condition.reason):
            return
        self.condition = Condition(state, reason, time.time())
        self._try_to_write()

    def catch_up(self) -> None:
        """Write what couldn't be written, if there is room again; to be called often."""
        if self._behind:
            self._try_to_write()

    def announced(self) -> bool:
        """Return whether somebody has announced the end."""
        return self._path is not None and announcement_file(self._path).exists()

    def _try_to_write(self) -> None:
        """Write, or be behind, and say so when that begins."""
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
            # mkstemp's mode is 0600; a probe may run as somebody else.
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink(missing_ok=True)
            raise
