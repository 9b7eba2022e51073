"""What the server's supervisor says of it: the state file, and the file beside it that announces an end.

Knows their format; whether what they say is true is what the other modules ask the server.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import NamedTuple

STARTING = "starting"
SERVING = "serving"
DRAINING = "draining"
FAILED = "failed"
UNREADABLE = "unreadable"


class State(NamedTuple):
    """name: one of the words above. reason: in one line. since: seconds since 1970."""

    name: str
    reason: str
    since: float

    def describe(self) -> str:
        """Say it in one line."""
        said = f"{self.name} for {max(time.time() - self.since, 0.0):.0f} s"
        return f"{said}: {self.reason}" if self.reason else said


def read_state(file: Path | None) -> State | None:
    """Return what the file says; None where there is none, because no supervisor has written it (yet).

    An announced end is an end, whatever the state file says but that it has failed.
    """
    if file is None:
        return None
    try:
        state = _parse(file)
        announced = file.with_name(f"{file.name}.announced").stat().st_mtime
    except FileNotFoundError:
        # The announcement is missing, which is the rule.
        return state
    except OSError as error:
        return State(UNREADABLE, f"{file}: {error.strerror}", time.time())
    if state is not None and state.name in (DRAINING, FAILED):
        return state
    return State(DRAINING, "its end is announced", announced)


def _parse(file: Path) -> State | None:
    try:
        written = file.read_bytes()
    except FileNotFoundError:
        return None
    try:
        said = json.loads(written)
        state = State(str(said["state"]), " ".join(str(said.get("reason", "")).split()), float(said["since"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        return State(UNREADABLE, f"{file} holds no state: {written[:80]!r}", time.time())
    if state.name not in (STARTING, SERVING, DRAINING, FAILED):
        return State(UNREADABLE, f"{file} holds the state {state.name!r}, which isn't one", time.time())
    return state
