"""Where to ask: a host and a port, as a probe's command line has them. Opens nothing."""

from __future__ import annotations

import re
from typing import NamedTuple

HTTP_PORT = 8000
METRICS_PORT = 8002

_WRITTEN = re.compile(r"(?:http://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?/?")


class Address(NamedTuple):
    """A host's name or address, IPv6 without brackets, and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int) -> Address:
        """Take apart `HOST`, `HOST:PORT` or `http://HOST:PORT`; an IPv6 address stands in brackets.

        Raises:
            ValueError: it is none of them, or the port is out of 1 ... 65535.
        """
        match = _WRITTEN.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no address; it must be HOST:PORT, of the server itself, in plain HTTP")
        host, port = match[1].strip("[]"), int(match[2] or default_port)
        if not 1 <= port <= 65535:
            raise ValueError(f"{text!r} has the port {port}; it must be from 1 to 65535")
        return cls(host, port)

    @property
    def metrics(self) -> Address:
        """Where Triton has its metrics if nobody says otherwise: the same host, two ports above the HTTP endpoint's."""
        return Address(self.host, self.port + METRICS_PORT - HTTP_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
