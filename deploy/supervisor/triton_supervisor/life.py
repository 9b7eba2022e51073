"""One tritonserver from its start to its end, and what that end means."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from triton_supervisor.process import ServerProcess

_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals of a fault in the process itself; SIGKILL is sent by another process."""


@dataclass(frozen=True)
class Outcome:
    """How a life has ended. code: the supervisor's, if nothing follows. served: it was ready before.

    death: why, in one line, if it ended without having been asked to, or died while it was ending; else None.
    """

    code: int
    death: str | None = None
    served: bool = False

    @property
    def crashed(self) -> bool:
        """Whether tritonserver died of a fault of its own."""
        return self.death is not None and is_crash(self.code)


class LifeCourse(Protocol):
    """What the supervisor does with one tritonserver."""

    def end(self) -> None:
        """Begin the shutdown; a second call has no effect."""

    def advance(self) -> None:
        """Take the next step without blocking; called several times a second."""

    def outcome(self, server_code: int) -> Outcome:
        """Return how the life has ended, once tritonserver has ended with this code (128 + N for signal N)."""


@dataclass(frozen=True)
class Life:
    """A tritonserver and its course."""

    server: ServerProcess
    course: LifeCourse


class Unwatched:
    """The course of a server that gets SIGINT, and SIGKILL when it takes too long."""

    def __init__(self, server: ServerProcess, grace: float, say: Callable[[str], None]) -> None:
        """grace: seconds between SIGINT and SIGKILL."""
        self._server = server
        self._grace = grace
        self._say = say
        self._deadline: float | None = None
        self.killed = False

    def end(self) -> None:
        """Send SIGINT; a second call has no effect."""
        if self._deadline is None:
            self._server.terminate()
            self._deadline = time.monotonic() + self._grace

    def advance(self) -> None:
        """Kill the server after its deadline."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._say(f"tritonserver didn't end within {self._grace:.0f} s of SIGINT: killed")
            self._server.kill()
            self.killed = True
            self._deadline = float("inf")

    def outcome(self, server_code: int) -> Outcome:
        """Return the server's own code; the supervisor doesn't judge an end that it doesn't watch for."""
        return Outcome(server_code)


def is_crash(server_code: int) -> bool:
    """Return whether it is the exit code of a tritonserver that died of a fault of its own."""
    return server_code - 128 in _CRASHES


def describe_end(server_code: int) -> str:
    """Return how tritonserver ended, with the signal's name if it died of one."""
    try:
        return f"tritonserver died of {signal.Signals(server_code - 128).name}"
    except ValueError:
        return f"tritonserver has ended with code {server_code}"
