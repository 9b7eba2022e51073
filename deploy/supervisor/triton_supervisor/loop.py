"""The supervisor's loop: wait for signals and advance the course, until it has an exit code.

Imports nothing of the package, so that signals can be blocked before anything else is loaded.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that request a graceful shutdown."""

PARENT_ENDS = signal.SIGUSR1
"""What the launcher requests it with. Others send SIGTERM to a whole control group, as systemd does, and standard
signals don't queue: of two pending SIGTERMs one remains, with either's sender."""

HEARD = (*END, PARENT_ENDS, signal.SIGQUIT, signal.SIGCHLD)

_POLL_S = 0.25


def block_signals() -> None:
    """Block HEARD: signals then wait until `Wishes.wait` takes them. Call it before starting anything."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)


class Course(Protocol):
    """What the supervisor does from its start to its end."""

    def end(self) -> None:
        """Begin the shutdown; a second call has no effect."""

    def kill(self) -> None:
        """End at once."""

    def advance(self) -> None:
        """Take the next step without blocking for long; called several times a second."""

    def exit_code(self) -> int | None:
        """Return the supervisor's exit code once everything has ended."""


class Wish(Enum):
    """What a signal requests."""

    END = auto()
    """Finish accepted requests, then end."""
    KILL = auto()
    """End at once."""


class Wishes:
    """Interprets signals, which must be blocked: END's end, SIGQUIT kills.

    again_kills: a second request to end kills, as at a terminal. parent: a process id whose end is a request to end,
    and then PARENT_ENDS is the other, and END's have no effect. Two equal signals in quick succession are one.
    """

    def __init__(self, *, again_kills: bool, parent: int | None = None) -> None:
        self._again_kills = again_kills
        self._parent = parent
        self._ends = END if parent is None else (PARENT_ENDS,)
        self._asked = False

    def wait(self) -> Wish | None:
        """Wait 0.25 s, or until a signal or a child's end; return what was requested."""
        received = signal.sigtimedwait(HEARD, _POLL_S)
        number = None if received is None else received.si_signo
        if number == signal.SIGQUIT:
            return Wish.KILL
        if number in self._ends:
            again, self._asked = self._asked, True
            return Wish.KILL if again and self._again_kills else Wish.END
        if self._parent is not None and os.getppid() != self._parent:
            return Wish.END
        return None


def run(course: Course, wishes: Wishes, each_round: Callable[[], None]) -> int:
    """Run the course to its end; return the exit code. each_round: called several times a second."""
    while (code := course.exit_code()) is None:
        each_round()
        wish = wishes.wait()
        if wish is Wish.KILL:
            course.kill()
        elif wish is Wish.END:
            course.end()
        course.advance()
    return code
