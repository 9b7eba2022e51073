"""The signals that the supervisor hears, blocked until it asks for them.

Imports nothing else of the package, so that they can be blocked before anything is loaded.
"""

from __future__ import annotations

import signal

END = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Wishes to end."""

HEARD = (*END, signal.SIGQUIT, signal.SIGCHLD)


def block_signals() -> None:
    """From now on signals wait until they are asked for. To be called before anything is started."""
    signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
