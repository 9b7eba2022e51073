"""A server's address, parsed from a URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

Protocol = Literal["http", "grpc"]

DEFAULT_PORTS: dict[Protocol, int] = {"http": 8000, "grpc": 8001}


@dataclass(frozen=True)
class ServerAddress:
    """A server's address under one protocol."""

    protocol: Protocol
    host: str
    """Name or address; IPv6 without brackets."""
    port: int
    base_path: str
    """HTTP only: the path before `/v2`, without a trailing slash; usually empty."""
    tls: bool

    @classmethod
    def parse(cls, url: str, protocol: Protocol) -> ServerAddress:
        """Parse `HOST[:PORT]`, `http[s]://HOST[:PORT][/PATH]` or `grpc[s]://HOST[:PORT]`.

        The default port is Triton's: 8000 for HTTP, 8001 for gRPC. The `s` schemes encrypt.

        Raises:
            ValueError: an unknown protocol, another form of URL, blanks, a port outside 1 ... 65535, or a scheme of
                another protocol.
        """
        if protocol not in get_args(Protocol):
            raise ValueError(f"protocol is {protocol!r}, must be 'http' or 'grpc'")
        if any(map(str.isspace, url)):
            raise ValueError(f"url is {url!r}, must not have blanks")
        parts = urlsplit(url if "://" in url else f"{protocol}://{url}")
        if parts.scheme not in (protocol, f"{protocol}s"):
            raise ValueError(f"url is {url!r}, but with protocol {protocol!r} it must start with {protocol}:// or none")
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url is {url!r}: its port must be a number from 1 to 65535") from error
        if not parts.hostname or port == 0:
            raise ValueError(f"url is {url!r}, must be HOST:PORT with a port from 1 to 65535")
        if parts.query or parts.fragment or parts.username or (protocol == "grpc" and parts.path.strip("/")):
            raise ValueError(f"url is {url!r}, must be no more than {protocol}://HOST:PORT")
        port = DEFAULT_PORTS[protocol] if port is None else port
        return cls(protocol, parts.hostname, port, parts.path.rstrip("/"), parts.scheme.endswith("s"))

    @property
    def authority(self) -> str:
        """`HOST:PORT`, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.authority}{self.base_path}"
