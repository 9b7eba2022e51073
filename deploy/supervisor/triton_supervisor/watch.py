"""Whether the model is dead: its processes are gone, or they are there and do nothing.

Knows what to look at and how to word it; what follows from a death is `supervision`'s.
"""

from __future__ import annotations

from collections.abc import Callable

from triton_supervisor.liveness import Liveness
from triton_supervisor.model_processes import ModelProcess, model_processes


class Watch:
    """Of one tritonserver's model; what it sees counts from the moment that the model is ready."""

    def __init__(
        self, server: int, listens: Callable[[], bool], liveness: Liveness | None, say: Callable[[str], None]
    ) -> None:
        """server: tritonserver's process id. listens: whether it takes connections. liveness: None doesn't ask."""
        self._server = server
        self._listens = listens
        self._liveness = liveness
        self._say = say
        self._processes: frozenset[ModelProcess] = frozenset()

    def wait(self) -> None:
        """The model is being loaded: look for a process of its own, until there is one."""
        if not self._processes:
            self._processes = model_processes(self._server)

    def begin(self) -> None:
        """The model is ready: its processes are those that are there now; if none is, those that were."""
        self._processes = model_processes(self._server) or self._processes
        if not self._processes:
            self._say("no model process is to be seen below tritonserver: only its answers are watched")
        if self._liveness is not None:
            self._liveness.begin()

    def end(self) -> None:
        """From now on the model may end."""
        if self._liveness is not None:
            self._liveness.end()

    def gone(self) -> frozenset[ModelProcess]:
        """Return those of its processes that have ended."""
        return frozenset(process for process in self._processes if not process.runs())

    def all_gone(self) -> bool:
        """Return whether it had processes and none of them runs any more."""
        return bool(self._processes) and self.gone() == self._processes

    def death(self) -> str | None:
        """Return why the model is dead, in one line; None if it isn't."""
        gone = self.gone()
        # A tritonserver that somebody else has told to end closes its port first, and then ends the model itself.
        if gone and self._listens():
            return f"the model process {min(process.pid for process in gone)} is gone: it crashed, or was killed"
        dead = None if self._liveness is None else self._liveness.death()
        return None if dead is None else f"the model is dead: {dead}"
