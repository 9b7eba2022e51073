"""The supervisor's loop: wait for signals and advance the server's course, until the server has ended.

Imports nothing of the package, so that signals can be blocked before anything else is loaded.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from triton_supervisor.process import ServerProcess

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that request a graceful shutdown."""

HEARD = (*END, signal.SIGQUIT, signal.SIGCHLD)

_POLL_S = 0.25


def block_signals() -> None:
    """Block HEARD: signals then wait until `Wishes.wait` takes them. Call it before starting anything."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)


class Course(Protocol):
    """What the supervisor does with a server from its start to its end."""

    def end(self) -> None:
        """Begin the shutdown; a second call has no effect."""

    def advance(self) -> None:
        """Take the next step without blocking; called several times a second."""

    def exit_code(self, server_code: int) -> int:
        """Return the supervisor's exit code for a server that has ended with this one."""


class Unwatched:
    """The course of a server that gets SIGTERM, and SIGKILL when it takes too long."""

    def __init__(self, server: ServerProcess, grace: float, say: Callable[[str], None]) -> None:
        """grace: seconds between SIGTERM and SIGKILL."""
        self._server = server
        self._grace = grace
        self._say = say
        self._deadline: float | None = None

    def end(self) -> None:
        """Send SIGTERM; a second call has no effect."""
        if self._deadline is None:
            self._server.terminate()
            self._deadline = time.monotonic() + self._grace

    def advance(self) -> None:
        """Kill the server after its deadline."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._say(f"tritonserver didn't end within {self._grace:.0f} s of SIGTERM: killed")
            self._server.kill()
            self._deadline = float("inf")

    def exit_code(self, server_code: int) -> int:
        """Return the server's own code."""
        return server_code


class Wish(Enum):
    """What a signal requests."""

    END = auto()
    """Finish accepted requests, then end."""
    KILL = auto()
    """End at once."""


class Wishes:
    """Interprets signals, which must be blocked: SIGTERM, SIGINT and SIGHUP end, SIGQUIT kills.

    again_kills: a second request to end kills, as at a terminal. parent: a process id whose end is a request to end.
    Two equal signals in quick succession are one.
    """

    def __init__(self, *, again_kills: bool, parent: int | None = None) -> None:
        self._again_kills = again_kills
        self._parent = parent
        self._asked = False

    def wait(self) -> Wish | None:
        """Wait 0.25 s, or until a signal or a child's end; return what was requested."""
        received = signal.sigtimedwait(HEARD, _POLL_S)
        number = None if received is None else received.si_signo
        if number == signal.SIGQUIT:
            return Wish.KILL
        if number in END:
            again, self._asked = self._asked, True
            return Wish.KILL if again and self._again_kills else Wish.END
        if self._parent is not None and os.getppid() != self._parent:
            return Wish.END
        return None


def run(server: ServerProcess, course: Course, wishes: Wishes, each_round: Callable[[], None]) -> int:
    """Run the course until the server has ended; return the exit code. each_round: called several times a second."""
    while (code := server.exit_code()) is None:
        each_round()
        wish = wishes.wait()
        if wish is Wish.KILL:
            server.kill()
        elif wish is Wish.END:
            course.end()
        course.advance()
    return course.exit_code(code)
