"""The watch over a model that serves: its processes exist, and it makes decode steps when asked to.

Probes run in a thread of their own, because one may take as long as its timeout while signals must be handled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from triton_supervisor.health import Limits, Verdict, live
from triton_supervisor.process_table import ModelProcess, model_processes
from triton_supervisor.triton_http import Address

MAX_FAILURES = 3
"""Consecutive probe failures before the model is declared dead."""

_EVERY_S = 5.0


@dataclass(frozen=True)
class Pace:
    """Seconds. step_age: a younger last step passes the probe at once. timeout: for a token otherwise.

    every: between two probes. first: before the first one.
    """

    step_age: float
    timeout: float
    every: float
    first: float

    @classmethod
    def for_verdict_within(cls, seconds: float) -> Pace:
        """Return the pace that declares a model dead at most `seconds` after its last step."""
        step_age = seconds / 4
        # Loading has just proved the model alive.
        return cls(step_age=step_age, timeout=seconds / 6, every=min(_EVERY_S, seconds / 24), first=step_age)


def live_probe(http: Address, metrics: Address | None, pace: Pace) -> Callable[[], Verdict]:
    """Return the liveness probe of the model at these addresses. metrics: None when they are off."""
    limits = Limits(timeout=pace.timeout, step_age=pace.step_age)
    return lambda: live(http, metrics, limits)


class Probes:
    """Probes until it is stopped, or the model is declared dead; `death` has the reason then."""

    def __init__(self, probe: Callable[[], Verdict], pace: Pace, say: Callable[[str], None]) -> None:
        """say: takes a line when the probe itself raises, which is no failure of the model."""
        self._probe = probe
        self._pace = pace
        self._say = say
        self._ended = threading.Event()
        self.death: str | None = None
        self._thread = threading.Thread(target=self._run, name="probes", daemon=True)

    def begin(self) -> None:
        """Start probing."""
        self._thread.start()

    def end(self) -> None:
        """Stop probing, without waiting."""
        self._ended.set()

    def _run(self) -> None:
        failures = 0
        pause = self._pace.first
        while not self._ended.wait(pause):
            pause = self._pace.every
            try:
                verdict = self._probe()
            except Exception as error:  # noqa: BLE001 - the thread's end would go unnoticed
                self._say(f"the liveness probe failed: {type(error).__name__}: {error}")
                continue
            failures = 0 if verdict.ok else failures + 1
            if failures >= MAX_FAILURES:
                self.death = verdict.reason
                return


class Watch:
    """Watches the model of one tritonserver from the moment it is ready."""

    def __init__(self, server: int, probes: Probes | None) -> None:
        """server: tritonserver's pid. probes: None watches the processes alone."""
        self._probes = probes
        self._processes: frozenset[ModelProcess] = model_processes(server)
        if probes is not None:
            probes.begin()

    def end(self) -> None:
        """Stop probing: the model is about to be unloaded."""
        if self._probes is not None:
            self._probes.end()

    def gone(self) -> list[int]:
        """Return the process ids of the model's processes that have ended."""
        return sorted(process.pid for process in self._processes if not process.runs())

    def all_gone(self) -> bool:
        """Return whether all of the model's processes, at least one, have ended."""
        return bool(self._processes) and len(self.gone()) == len(self._processes)

    def death(self) -> str | None:
        """Return why the model is dead, in one line; None if it isn't."""
        if gone := self.gone():
            return f"the model process {gone[0]} is gone: it crashed, or was killed"
        if self._probes is not None and self._probes.death is not None:
            return f"the model is dead: {self._probes.death}"
        return None
