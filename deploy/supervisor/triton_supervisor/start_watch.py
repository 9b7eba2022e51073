"""How long tritonserver may take to be ready when it is started again.

The first start may take any time, because a checkpoint may be downloaded and quantized, and an orchestrator's startup
probe bounds it. That probe is over when a later start hangs, and the state "starting" counts as alive.
"""

from __future__ import annotations

import time

_LEAST_S = 120.0
_SLOWER = 5
"""A later start may take this multiple of the slowest one so far, and _LEAST_S at least."""


class StartWatch:
    """Watches one start after the other, each from the moment it is made or `begin` is called.

    hung: in one line, why the start of the moment counts as hung; None while it doesn't.
    """

    def __init__(self) -> None:
        self._slowest: float | None = None
        self.begin()

    def begin(self) -> None:
        """Watch another start."""
        self._since = time.monotonic()
        self._over = False
        self.hung: str | None = None

    def hangs(self, starting: bool) -> bool:
        """Return whether the start takes too long; call it often. starting: it isn't ready yet."""
        if self._over:
            return self.hung is not None
        took = time.monotonic() - self._since
        if not starting:
            self._over = True
            self._slowest = max(took, self._slowest or 0.0)
        elif self._slowest is not None and took > (bound := max(_LEAST_S, _SLOWER * self._slowest)):
            self._over = True
            self.hung = f"tritonserver isn't ready {bound:.0f} s after its start"
        return self.hung is not None
