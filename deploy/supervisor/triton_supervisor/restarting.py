"""The supervisor's course: one tritonserver after another, each started when the one before has died.

    begin ── life ──(asked to end)── its exit code
      ▲        └──(died)── clean up ── pause ──┐
      └────────────(within the bounds)─────────┘

A tritonserver that ends without having been asked to is replaced: it has died of a signal, or its model has, or is
stuck. One that never was ready and ends with a code of its own refuses what it was given, and stays ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from triton_supervisor.life import Life, Outcome
from triton_supervisor.restarts import Restart, Restarts
from triton_supervisor.settings import DEAD, DRAINED
from triton_supervisor.start_watch import StartWatch
from triton_supervisor.state import StateFile

_NO_ROUTE = " (the last request's route is unknown: tritonserver logs it with --log-verbose=1 only)"
_SIGNALLED = 128
"""Exit codes above it name a signal."""
_KILLED = _SIGNALLED + signal.SIGKILL
_NOT_STARTED = 1


@dataclass(frozen=True)
class _Next:
    """The next life. at: on the monotonic clock. reason: what the state says while it loads: why the last one ended."""

    at: float
    reason: str


class Restarting:
    """A Course. say: takes the one line about a death."""

    def __init__(
        self,
        begin: Callable[[int], Life],
        clean_up: Callable[[], None],
        restarts: Restarts,
        state: StateFile,
        say: Callable[[str], None],
    ) -> None:
        """begin: starts a tritonserver; takes the number of restarts before it.

        clean_up: removes what a dead one has left.
        """
        self._begin = begin
        self._clean_up = clean_up
        self._restarts = restarts
        self._state = state
        self._say = say
        self._has_served = False
        self._ending = False
        self._killed = False
        self._code: int | None = None
        self._next: _Next | None = None
        self._starts = StartWatch()
        self._life: Life | None = begin(0)

    def end(self) -> None:
        """Begin to drain; between two lives there is nothing to drain."""
        self._ending = True
        if self._life is not None:
            self._life.course.end()
        elif self._code is None:
            self._code = DRAINED

    def kill(self) -> None:
        """Kill the server; it isn't started again."""
        self._ending = self._killed = True
        if self._life is not None:
            self._life.server.kill()
        elif self._code is None:
            self._code = _KILLED

    def exit_code(self) -> int | None:
        """Return the exit code once the last tritonserver has ended."""
        return self._code

    def advance(self) -> None:
        """Advance the life, replace it, or wait for the time of the next one."""
        if self._code is not None:
            return
        if self._life is None:
            self._begin_again()
        elif (server_code := self._life.server.exit_code()) is None:
            self._life.course.advance()
            if self._starts.hangs(self._state.condition.state == "starting"):
                self._life.server.kill()
        else:
            life, self._life = self._life, None
            self._ended(life.course.outcome(server_code))
            self._clean_up()
            if self._code is None:
                self._begin_again()

    def _begin_again(self) -> None:
        assert self._next is not None
        if time.monotonic() >= self._next.at:
            self._state.enter("starting", self._next.reason)
            self._starts.begin()
            try:
                self._life = self._begin(self._restarts.total)
            except (OSError, RuntimeError) as error:  # no memory, no process or no thread left
                self._ended(Outcome(_NOT_STARTED, f"tritonserver can't be started: {error}"))
                self._clean_up()

    def _ended(self, outcome: Outcome) -> None:
        if self._starts.hung and outcome.death is not None:
            outcome = replace(outcome, death=self._starts.hung)
        self._has_served = self._has_served or outcome.served
        restart = self._restart_after(outcome)
        if restart is None:
            self._give_up(outcome)
            return
        when = "at once" if restart.pause == 0 else f"in {restart.pause:g} s"
        route = _NO_ROUTE if outcome.served and outcome.code != DEAD else ""
        self._say(f"{outcome.death}{route}; tritonserver is started again {when} ({restart})")
        self._next = _Next(time.monotonic() + restart.pause, f"{outcome.death}; started again ({restart})")
        # Entered again when that life begins: the state tells a pause from a start.
        self._state.enter("starting", f"{outcome.death}; started again {when} ({restart})")

    def _can_heal(self, outcome: Outcome) -> bool:
        # Who has ended it with code 0 has asked it to end.
        died = outcome.death is not None and outcome.code != DRAINED and not self._ending
        return died and (self._has_served or outcome.crashed)

    def _restart_after(self, outcome: Outcome) -> Restart | None:
        if not self._can_heal(outcome):
            return None
        return self._restarts.after_death() if self._has_served else self._restarts.after_start_crash()

    def _give_up(self, outcome: Outcome) -> None:
        self._code = outcome.code
        if outcome.death is None or self._killed:
            return
        self._state.enter("failed", outcome.death)
        # A code of its own before it ever served: tritonserver's own last error has the reason.
        if self._has_served or outcome.code > _SIGNALLED:
            tried = self._restarts.exhausted() if self._can_heal(outcome) else ""
            self._say(f"{outcome.death}{tried}; the server ends with code {outcome.code}")
