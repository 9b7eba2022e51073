"""The supervisor's one loop: hear signals, move on, until the server has ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

from triton_supervisor.process import ServerProcess
from triton_supervisor.signals import END, HEARD

_POLL_S = 0.25


class Course(Protocol):
    """What is done with a server from its start to its end."""

    def end(self) -> None:
        """Begin to end it; a second time has no effect."""

    def advance(self) -> None:
        """Take the next look, or the next step; called several times a second, and must not take long."""

    def exit_code(self, server_code: int) -> int:
        """Return what the supervisor ends with when the server has ended with this code."""


class Wish(Enum):
    """What somebody outside wants."""

    END = auto()
    """Answer what was accepted, then end."""
    KILL = auto()
    """End at once."""


class Wishes:
    """Signals, taken for what they mean: SIGTERM, SIGINT and SIGHUP to end, SIGQUIT to kill. They must be blocked.

    again_kills: a second wish to end is one to kill, as at a terminal. parent: a process id; that its end is a wish to
    end, too. Two equal signals in quick succession are one.
    """

    def __init__(self, *, again_kills: bool, parent: int | None = None) -> None:
        self._again_kills = again_kills
        self._parent = parent
        self._asked = False

    def wait(self) -> Wish | None:
        """Wait a moment, until a child ends at the latest, and return what was wished."""
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
    """Accompany the server until it has ended; return the exit code. each_round: called several times a second."""
    while (code := server.exit_code()) is None:
        each_round()
        wish = wishes.wait()
        if wish is Wish.KILL:
            server.kill()
        elif wish is Wish.END:
            course.end()
        course.advance()
    return course.exit_code(code)
