"""A process's TCP sockets from /proc: the ports it listens on, and the bytes that its clients haven't taken.

On SIGTERM Triton waits for connections, idle ones included, so it can't tell when clients have their responses. The
kernel can: it knows which bytes are unacknowledged. It doesn't know what a gRPC client has read of a stream that it
keeps open: gRPC takes bytes before its application asks for them, and drops them when the connection closes
(perf/LOG.md). Only time helps there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from triton_supervisor.tcp_acknowledged import acknowledged_bytes

PAUSE_S = 2.0
"""Time for a response to get from the model to the socket."""

STALLED_S = 5.0
"""A client that takes no byte for this long is abandoned."""

READING_S = 15.0
"""Time for clients that keep a gRPC stream open to read what has arrived, after the last response."""

_LISTENING = "0A"


@dataclass(frozen=True)
class TcpSocket:
    """One socket. unsent: bytes written to it that the peer hasn't acknowledged."""

    inode: int
    port: int
    listens: bool
    unsent: int


def listening_ports(pid: int) -> set[int]:
    """Return the ports that process `pid` listens on; none if it is gone."""
    return {socket.port for socket in _sockets(pid) if socket.listens}


def unsent_bytes(pid: int) -> int:
    """Return how many bytes process `pid` has written that its clients haven't taken; 0 if it is gone."""
    # For a listening socket the field is the limit of its queue.
    return sum(socket.unsent for socket in _sockets(pid) if not socket.listens)


def taken_bytes(pid: int, without: Collection[int]) -> dict[int, int]:
    """Return the bytes that each client of process `pid` has acknowledged, by the connection's inode.

    without: ports to leave out. Raises OSError if the kernel doesn't tell.
    """
    own = {one.inode for one in _sockets(pid) if not one.listens and one.port not in without}
    return {inode: taken for inode, taken in acknowledged_bytes().items() if inode in own} if own else {}


def flush(pid: int, deadline: float, reading: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Yield until the clients of process `pid` have taken everything, or take nothing more, or until `deadline`.

    deadline: on the monotonic clock. reading: whether a client may still read what it has taken; it is waited for no
    longer than READING_S, whatever else it asks meanwhile. The caller may pause between iterations.
    """
    began = moved = time.monotonic()
    left = unsent_bytes(pid)
    while True:
        now = time.monotonic()
        taken = left == 0 or now - moved >= STALLED_S
        read = now - began >= READING_S or not reading()
        if now - began >= PAUSE_S and ((taken and read) or now >= deadline):
            return
        yield
        latest = unsent_bytes(pid)
        if latest != left:
            left, moved = latest, time.monotonic()


def _sockets(pid: int) -> Iterator[TcpSocket]:
    process = Path(f"/proc/{pid}")
    own = set()
    try:
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since
                own.add(str(descriptor.readlink()))
        # gRPC listens on every address through IPv6, also for IPv4.
        tables = [(process / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return  # the process has ended
    for line in (line for table in tables for line in table):
        _, local, _, state, queues, _, _, _, _, inode = line.split()[:10]
        if f"socket:[{inode}]" in own:
            port, unsent = int(local.rpartition(":")[2], 16), int(queues.partition(":")[0], 16)
            yield TcpSocket(int(inode), port, state == _LISTENING, unsent)
