"""Waiting for a state, and not for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def until(condition: Callable[[], bool], what: Callable[[], str]) -> None:
    """Ask again and again whether it has happened; it must, sooner or later. `what` is asked if it doesn't."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen: {what()}"
        time.sleep(0.02)
