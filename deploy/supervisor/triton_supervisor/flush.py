"""Waiting until clients have taken their answers, when nothing new is being written.

Triton on SIGTERM waits for connections, idle ones included, so it can't tell. The kernel can: it knows which bytes
nobody has acknowledged. What gRPC holds back for a client that doesn't read its stream is not to be seen there: such a
client has PAUSE_S.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from triton_supervisor.sockets import unsent_bytes

PAUSE_S = 2.0
"""An answer that has just left the model is in the socket by then."""

STALLED_S = 5.0
"""A client that takes nothing for so long has had its time."""


def flush(pid: int, deadline: float) -> Iterator[None]:
    """Yield until the clients of process `pid` have taken everything, or take nothing more, or `deadline` has come.

    deadline: on the monotonic clock. Whoever iterates may pause as he likes.
    """
    began = time.monotonic()
    left, moved = unsent_bytes(pid), began
    while True:
        now = time.monotonic()
        if now - began >= PAUSE_S and (left == 0 or now - moved >= STALLED_S or now >= deadline):
            return
        yield
        latest = unsent_bytes(pid)
        if latest != left:
            left, moved = latest, time.monotonic()
