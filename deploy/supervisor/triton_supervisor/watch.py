"""The watch over a model that serves: its processes exist, and it makes decode steps when asked to.

Probes run in a thread of their own, because one may take as long as its timeout while signals must be handled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from triton_supervisor.health import Limits, Verdict, live
from triton_supervisor.process import model_processes, runs
from triton_supervisor.triton import Address

MAX_FAILURES = 3
"""Consecutive probe failures before the model is declared dead."""

_MAX_PAUSE_S = 5.0

Probe = Callable[[], Verdict]


def live_probe(http: Address, metrics: Address | None, stuck: float) -> tuple[Probe, float]:
    """Return a probe that declares a model dead `stuck` seconds after its last step, and the pause between two."""
    limits = Limits(timeout=stuck / 6, step_age=stuck / 4)
    return lambda: live(http, metrics, limits), min(_MAX_PAUSE_S, stuck / 24)


class Watch:
    """Watches the model of one tritonserver from the moment it is ready."""

    def __init__(self, server: int, probe: Probe | None, pause: float = _MAX_PAUSE_S) -> None:
        """server: tritonserver's pid. probe: None watches the processes alone. pause: seconds before each probe."""
        self._processes = model_processes(server)
        self._pause = pause
        self._ended = threading.Event()
        self._failure: str | None = None
        if probe is not None:
            threading.Thread(target=self._probe, args=(probe,), name="probes", daemon=True).start()

    def end(self) -> None:
        """Stop probing, without waiting: the model is about to be unloaded."""
        self._ended.set()

    def gone(self) -> list[int]:
        """Return the process ids of the model's processes that have ended."""
        return [process.pid for process in self._processes if not runs(process)]

    def all_gone(self) -> bool:
        """Return whether all of the model's processes, at least one, have ended."""
        return bool(self._processes) and len(self.gone()) == len(self._processes)

    def death(self) -> str | None:
        """Return why the model is dead, in one line; None if it isn't."""
        if gone := self.gone():
            return f"the model process {gone[0]} is gone: it crashed, or was killed"
        return None if self._failure is None else f"the model is dead: {self._failure}"

    def _probe(self, probe: Probe) -> None:
        failures = 0
        while not self._ended.wait(self._pause):
            verdict = probe()
            failures = 0 if verdict.ok else failures + 1
            if failures >= MAX_FAILURES:
                self._failure = verdict.reason
                return
