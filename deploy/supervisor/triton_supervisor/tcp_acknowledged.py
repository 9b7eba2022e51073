"""How many bytes of each TCP connection the peer has acknowledged: `tcpi_bytes_acked`, through netlink's sock_diag(7).

Structures: linux/netlink.h, linux/inet_diag.h and linux/tcp.h.
"""

from __future__ import annotations

import socket
import struct

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_DONE = 3
_ERROR = 2
_ESTABLISHED = 1
_TCP_INFO = 2
_BYTES_ACKED = 120
"""Offset in tcp_info."""

_HEADER = struct.Struct("=IHHII")
# Family, protocol, extensions, padding, states, and a socket's address, which a dump leaves empty.
_REQUEST = struct.Struct("=BBBBI48x")
_MESSAGE_BYTES = 72
_INODE = 68
"""Offset in inet_diag_msg."""
_ATTRIBUTE = struct.Struct("=HH")
_DATAGRAM_BYTES = 1 << 17


def acknowledged_bytes() -> dict[int, int]:
    """Return the bytes acknowledged, by the socket's inode, of this network namespace's established connections.

    Raises OSError where the kernel doesn't offer it.
    """
    found: dict[int, int] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(1.0)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), 0, 1 << _ESTABLISHED)
            netlink.send(_HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
            while _take(netlink.recv(_DATAGRAM_BYTES), found):
                pass
    return found


def _take(datagram: bytes, found: dict[int, int]) -> bool:
    """Add a datagram's connections; return whether another follows."""
    at = 0
    while at < len(datagram):
        size, kind, *_ = _HEADER.unpack_from(datagram, at)
        if kind == _DONE:
            return False
        if kind == _ERROR:
            (code,) = struct.unpack_from("=i", datagram, at + _HEADER.size)
            raise OSError(-code, "sock_diag refuses to list TCP connections")
        message = datagram[at + _HEADER.size : at + size]
        (inode,) = struct.unpack_from("=I", message, _INODE)
        information = _attribute(message, _TCP_INFO)
        if len(information) >= _BYTES_ACKED + 8:
            (found[inode],) = struct.unpack_from("=Q", information, _BYTES_ACKED)
        at += -(-size // 4) * 4
    return True


def _attribute(message: bytes, wanted: int) -> bytes:
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == wanted:
            return message[at + _ATTRIBUTE.size : at + size]
        at += max(-(-size // 4) * 4, _ATTRIBUTE.size)
    return b""
