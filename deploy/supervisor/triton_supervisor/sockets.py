"""A process's TCP sockets from /proc: the ports it listens on, and the bytes that its clients haven't taken.

On SIGTERM Triton waits for connections, idle ones included, so it can't tell when clients have their responses. The
kernel can: it knows which bytes are unacknowledged. Bytes that gRPC holds back for a client that reads its stream
slowly are not in the kernel (HTTP/2's flow control); while they flow, the number of acknowledged bytes grows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from triton_supervisor.tcp_acknowledged import acknowledged_bytes

PAUSE_S = 2.0
"""Time for a response to get from the model to the socket."""

STALLED_S = 5.0
"""A client that takes no byte for this long is abandoned."""

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


def connections(pid: int, without: Collection[int]) -> frozenset[int]:
    """Return the inodes of process `pid`'s connections, except those on the ports `without`."""
    return frozenset(one.inode for one in _sockets(pid) if not one.listens and one.port not in without)


def flush(pid: int, deadline: float, streams: Collection[int] = ()) -> Iterator[None]:
    """Yield until the clients of process `pid` have taken everything, or take nothing more, or until `deadline`.

    deadline: on the monotonic clock. streams: inodes of connections for which gRPC may hold bytes back, so that they
    count as finished only after STALLED_S without a byte taken. The caller may pause between iterations. Raises OSError
    if there are streams and the kernel doesn't tell what their peers have acknowledged.
    """
    began = time.monotonic()
    left, moved = _progress(pid, streams), began
    while True:
        now = time.monotonic()
        if now - began >= PAUSE_S and ((left[0] == 0 and not streams) or now - moved >= STALLED_S or now >= deadline):
            return
        yield
        latest = _progress(pid, streams)
        if latest != left:
            left, moved = latest, time.monotonic()


def _progress(pid: int, streams: Collection[int]) -> tuple[int, int]:
    """Return the bytes that the clients haven't taken, and those that the streams' have."""
    taken = acknowledged_bytes() if streams else {}
    return unsent_bytes(pid), sum(taken.get(inode, 0) for inode in streams)


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
