"""A server that is only told to end, and killed when it takes too long: what it does meanwhile is its own business."""

from __future__ import annotations

import time
from collections.abc import Callable

from triton_supervisor.process import ServerProcess


class Unwatched:
    """The course of such a server: it runs, gets SIGTERM, and ends by itself or doesn't."""

    def __init__(self, server: ServerProcess, grace: float, say: Callable[[str], None]) -> None:
        """grace: seconds between SIGTERM and SIGKILL."""
        self._server = server
        self._grace = grace
        self._say = say
        self._deadline: float | None = None

    def end(self) -> None:
        """Tell it to end; a second time has no effect."""
        if self._deadline is None:
            self._server.terminate()
            self._deadline = time.monotonic() + self._grace

    def advance(self) -> None:
        """Kill it if its time is up."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self._say(f"tritonserver didn't end within {self._grace:.0f} s of SIGTERM: killed")
            self._server.kill()
            self._deadline = float("inf")

    def exit_code(self, server_code: int) -> int:
        """Return what the supervisor ends with when the server has ended with this code: the same."""
        return server_code
