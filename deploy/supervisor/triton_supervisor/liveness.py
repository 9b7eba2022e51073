"""Liveness of the model: its processes exist, and it makes decode steps when asked to.

Probes run in a thread of their own, because one may take as long as its timeout while signals must be handled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from triton_llama.health import Address, Limits, Verdict, live

from triton_supervisor.process_table import ModelProcess, model_processes

FAILURES = 3
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


class Liveness:
    """Probes until it is stopped, or the model is declared dead."""

    def __init__(self, probe: Callable[[], Verdict], pace: Pace, say: Callable[[str], None]) -> None:
        """say: takes a line when the probe itself raises, which is no failure of the model."""
        self._probe = probe
        self._pace = pace
        self._say = say
        self._ended = threading.Event()
        self._death: str | None = None
        self._thread = threading.Thread(target=self._run, name="liveness", daemon=True)

    def begin(self) -> None:
        """Start probing."""
        self._thread.start()

    def end(self) -> None:
        """Stop probing, without waiting; the result of a running probe is discarded."""
        self._ended.set()

    def death(self) -> str | None:
        """Return why the model is dead; None if it isn't, or after `end`."""
        return None if self._ended.is_set() else self._death

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
            if failures >= FAILURES:
                self._death = verdict.reason
                return


class Watch:
    """Watches the processes of one tritonserver's model from the moment it is ready, and its liveness."""

    def __init__(
        self, server: int, listens: Callable[[], bool], liveness: Liveness | None, say: Callable[[str], None]
    ) -> None:
        """server: tritonserver's pid. listens: whether it accepts connections. liveness: None disables probes."""
        self._server = server
        self._listens = listens
        self._liveness = liveness
        self._say = say
        self._processes: frozenset[ModelProcess] = frozenset()

    def wait(self) -> None:
        """Look for a model process while the model is loading."""
        if not self._processes:
            self._processes = model_processes(self._server)

    def begin(self) -> None:
        """Watch the processes of the model, which is ready; if none is there now, those seen before."""
        self._processes = model_processes(self._server) or self._processes
        if not self._processes:
            self._say("there is no model process below tritonserver: only the probes watch the model")
        if self._liveness is not None:
            self._liveness.begin()

    def end(self) -> None:
        """Stop probing: the model is about to be unloaded."""
        if self._liveness is not None:
            self._liveness.end()

    def gone(self) -> frozenset[ModelProcess]:
        """Return the watched processes that have ended."""
        return frozenset(process for process in self._processes if not process.runs())

    def all_gone(self) -> bool:
        """Return whether all watched processes, at least one, have ended."""
        return bool(self._processes) and self.gone() == self._processes

    def death(self) -> str | None:
        """Return why the model is dead, in one line; None if it isn't."""
        gone = self.gone()
        # A tritonserver that another process has terminated closes its port first, and then ends the model itself.
        if gone and self._listens():
            return f"the model process {min(process.pid for process in gone)} is gone: it crashed, or was killed"
        dead = None if self._liveness is None else self._liveness.death()
        return None if dead is None else f"the model is dead: {dead}"
