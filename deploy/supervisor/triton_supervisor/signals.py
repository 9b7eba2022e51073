"""The supervisor's signals: blocked from the beginning, and taken one at a time.

Imports nothing of the package, so that signals can be blocked before anything else is loaded: the kernel drops signals
that process 1 neither handles nor blocks.
"""

from __future__ import annotations

import signal

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Request a graceful shutdown; repeated ones change nothing."""
KILL = signal.SIGQUIT
"""Ends everything at once."""
POLL_S = 0.25

_TAKEN = (*END, KILL, signal.SIGCHLD)


def block_signals() -> None:
    """Block them, so that they wait until `wait_for_signal` takes them. Call it before starting anything."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN)


def wait_for_signal() -> int | None:
    """Wait for POLL_S at most; return the signal that came, SIGCHLD at a child's end, None without one."""
    received = signal.sigtimedwait(_TAKEN, POLL_S)
    return None if received is None else received.si_signo
