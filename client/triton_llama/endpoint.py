"""Where the server is: a URL taken apart. Knows schemes and default ports, opens nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args
from urllib.parse import urlsplit

Protocol = Literal["http", "grpc"]

_DEFAULT_PORT: dict[Protocol, int] = {"http": 8000, "grpc": 8001}


@dataclass(frozen=True)
class Endpoint:
    """A server's address under one protocol."""

    protocol: Protocol
    host: str
    """Name or address; IPv6 without brackets."""
    port: int
    base_path: str
    """HTTP only: what stands before `/v2`, without a slash at the end; mostly empty."""
    tls: bool

    @classmethod
    def parse(cls, url: str, protocol: Protocol) -> Endpoint:
        """Take apart `HOST[:PORT]`, `http[s]://HOST[:PORT][/PATH]` or `grpc[s]://HOST[:PORT]`.

        Without a port it is Triton's own: 8000 for HTTP, 8001 for gRPC. The `s` schemes encrypt.

        Raises:
            ValueError: no host, a port out of 1 ... 65535, or a scheme that isn't the protocol's.
        """
        if protocol not in get_args(Protocol):
            raise ValueError(f"protocol is {protocol!r}, must be 'http' or 'grpc'")
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
        return cls(
            protocol=protocol,
            host=parts.hostname,
            port=port if port is not None else _DEFAULT_PORT[protocol],
            base_path=parts.path.rstrip("/"),
            tls=parts.scheme.endswith("s"),
        )

    @property
    def authority(self) -> str:
        """`HOST:PORT`, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.protocol}{'s' if self.tls else ''}://{self.authority}{self.base_path}"
