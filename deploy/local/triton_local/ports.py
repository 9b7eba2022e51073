"""Ports of the services: given or free ones, held until tritonserver has bound them.

A model takes long to load, and tritonserver binds only after that. Until then the ports are held by sockets that are
bound with SO_REUSEADDR and don't listen: Linux doesn't hand out such a port as a free one, but lets a server that names
it (with SO_REUSEADDR, as tritonserver does) bind and listen.
"""

import errno
import ipaddress
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Literal

from triton_local.errors import InvalidSettingError

Service = Literal["http", "grpc", "metrics", "openai"]
SERVICES: tuple[Service, ...] = ("http", "grpc", "metrics")
"""tritonserver's own; the endpoint is a process beside it."""


def resolve_host(host: str) -> str:
    """Return the IPv4 address to listen on; tritonserver takes no names. Raises InvalidSettingError without one."""
    try:
        return str(socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise InvalidSettingError(f"host {host!r} is no IPv4 address and no name that has one: {error}") from error


def reachable_host(address: str) -> str:
    """Return the address at which a client on this machine reaches a server that listens on `address`."""
    return "127.0.0.1" if ipaddress.ip_address(address).is_unspecified else address


class HeldPorts:
    """Distinct ports on `address`, one for each requested service, held until the context is left or `close`.

    requested: 0 is any free port. Raises InvalidSettingError for a port that is taken or can't be bound.
    """

    def __init__(self, address: str, requested: Mapping[Service, int]) -> None:
        self.numbers: dict[Service, int] = {}
        with ExitStack() as stack:
            # Given ports first: a free one might be given to a later service.
            for service in sorted(requested, key=lambda service: requested[service] == 0):
                port = requested[service]
                for other, taken in self.numbers.items():
                    if port == taken:
                        raise InvalidSettingError(f"port {port} is set twice: {other} and {service}")
                held = stack.enter_context(_bound_socket(address, port, service))
                self.numbers[service] = int(held.getsockname()[1])
            self._held = stack.pop_all()

    def __enter__(self) -> "HeldPorts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release them; harmless the second time."""
        self._held.close()


def _bound_socket(address: str, port: int, service: Service) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((address, port))
    except OSError as error:
        held.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidSettingError(
                f"port {port} ({service}) on {address} is in use: "
                f"choose another with --{service}-port, 0 for any free one"
            ) from error
        raise InvalidSettingError(f"port {port} ({service}) on {address} can't be bound: {error.strerror}") from error
    except OverflowError as error:
        held.close()
        raise InvalidSettingError(f"port {port} ({service}) is out of bounds: 0 ... 65535") from error
    return held
