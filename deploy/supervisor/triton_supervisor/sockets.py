"""A process's TCP sockets, as the kernel shows them: which ports it listens on, what its clients haven't taken yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"


@dataclass(frozen=True)
class TcpSocket:
    """One socket. unsent: bytes that were written to it and that the other side hasn't acknowledged."""

    port: int
    listens: bool
    unsent: int


def listening_ports(pid: int) -> set[int]:
    """Return the ports that process `pid` listens on; none if it is gone."""
    return {socket.port for socket in _sockets(pid) if socket.listens}


def unsent_bytes(pid: int) -> int:
    """Return how many bytes process `pid` has written to its clients that they haven't taken; 0 if it is gone."""
    # What a listening socket has in that place is something else, its queue's limit.
    return sum(socket.unsent for socket in _sockets(pid) if not socket.listens)


def _sockets(pid: int) -> Iterator[TcpSocket]:
    process = Path(f"/proc/{pid}")
    own = set()
    try:
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed under our eyes
                own.add(str(descriptor.readlink()))
        # gRPC listens on every address through IPv6, also for IPv4.
        tables = [(process / "net" / name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    except OSError:
        return  # the process has ended
    for line in (line for table in tables for line in table):
        _, local, _, state, queues, _, _, _, _, inode = line.split()[:10]
        if f"socket:[{inode}]" in own:
            port, unsent = int(local.rpartition(":")[2], 16), int(queues.partition(":")[0], 16)
            yield TcpSocket(port, state == _LISTENING, unsent)
