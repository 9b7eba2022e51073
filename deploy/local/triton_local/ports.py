"""Addresses and ports of the services: given or free ones."""

import errno
import ipaddress
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from triton_local.errors import InvalidSettingError

SERVICES = ("http", "grpc", "metrics")
"""tritonserver's."""


def resolve_host(host: str) -> str:
    """Return the IPv4 address to listen on; tritonserver takes no names. Raises InvalidSettingError without one."""
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise InvalidSettingError(f"host {host!r} is no IPv4 address and no name that has one: {error}") from error


def reachable_host(address: str) -> str:
    """Return the address at which a client on this machine reaches a server that listens on `address`."""
    return "127.0.0.1" if ipaddress.ip_address(address).is_unspecified else address


def choose_ports(address: str, requested: Mapping[str, int], holder: ExitStack | None = None) -> dict[str, int]:
    """Return a port for each service: the requested one, or any free one for 0.

    holder: keeps them bound until it is closed. Programs that ask for any free port don't get them then, and a server
    can listen on them. Without it, such a program may take one before the server does, whose start then fails.
    Raises InvalidSettingError for a port that is in use or can't be bound.
    """
    with ExitStack() as stack:  # all bound at once: the free ones differ
        sockets = {service: stack.enter_context(_bound(address, port, service)) for service, port in requested.items()}
        if holder is not None:
            holder.push(stack.pop_all())
        return {service: int(bound.getsockname()[1]) for service, bound in sockets.items()}


def _bound(address: str, port: int, service: str) -> socket.socket:
    # As servers bind: a port whose last connections are still closing is free.
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except (OSError, OverflowError) as error:
        bound.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise InvalidSettingError(
                f"port {port} ({service}) on {address} is in use: "
                f"choose another with --{service}-port, 0 for any free one"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else "it must be 0 ... 65535"
        raise InvalidSettingError(f"port {port} ({service}) on {address} can't be bound: {reason}") from error
    return bound
