"""How much of the processors' time a virtual machine's host gave to others: on such a machine a figure means little
without it."""

from __future__ import annotations

import psutil


class Stolen:
    """Counts from when it is made. On a machine of one's own, and where the system doesn't tell, nothing is stolen."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        """Return what was stolen as a share of the time that all processors had."""
        now = psutil.cpu_times()
        passed = sum(now) - sum(self._before)
        # `guest` times are in `user` already, but a server that measures models runs no guests.
        return (getattr(now, "steal", 0.0) - getattr(self._before, "steal", 0.0)) / passed if passed > 0 else 0.0
