"""The watch over a model that serves: its processes exist, and it makes decode steps when asked to.

Probes run in a thread of their own, because one may take as long as its timeout while signals must be handled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

import psutil

from triton_supervisor.health import Limits, Verdict
from triton_supervisor.process import runs

_MAX_PAUSE_S = 5.0

Probe = Callable[[Limits], Verdict]


class Watch:
    """Watches the model's processes, and probes the model.

    stuck: maximum of seconds from the last step until a model that makes none when asked counts as dead; 0: no probes.
    """

    def __init__(self, processes: Collection[psutil.Process], probe: Probe, stuck: float) -> None:
        self.processes = processes
        self._probe = probe
        self._stuck = stuck
        self._ended = threading.Event()
        self._failure: str | None = None
        if stuck:
            threading.Thread(target=self._probe_repeatedly, name="probes", daemon=True).start()

    def end(self) -> None:
        """Stop probing, without waiting: the model is about to be unloaded."""
        self._ended.set()

    def gone(self) -> list[int]:
        """Return the process ids of the model's processes that have ended."""
        return [process.pid for process in self.processes if not runs(process)]

    def all_gone(self) -> bool:
        """Return whether all of the model's processes, at least one, have ended."""
        return bool(self.processes) and len(self.gone()) == len(self.processes)

    def death(self) -> str | None:
        """Return why the model is dead, in one line; None if it isn't."""
        if gone := self.gone():
            return f"the model process {gone[0]} is gone: it crashed, or was killed"
        return None if self._failure is None else f"the model is dead: {self._failure}"

    def _probe_repeatedly(self) -> None:
        limits = Limits(timeout=self._stuck / 6, step_age=self._stuck / 4)
        pause = min(_MAX_PAUSE_S, self._stuck / 24)
        # After this, the probe that fails next may end more than `stuck` seconds after the last step.
        patience = self._stuck - limits.step_age - limits.timeout - pause
        succeeded = time.monotonic()
        while not self._ended.wait(pause):
            verdict = self._probe(limits)
            if verdict.ok:
                succeeded = time.monotonic()
            elif time.monotonic() - succeeded >= patience:
                self._failure = verdict.reason
                return
