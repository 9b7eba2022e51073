"""Triton over HTTP: an address, and one request on a connection of its own. Standard library only."""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Mapping
from email.utils import mktime_tz, parsedate_tz
from typing import NamedTuple

HTTP_PORT = 8000
METRICS_PORT = 8002
_MIN_TIMEOUT_S = 0.05
"""A socket timeout of 0 would make the socket non-blocking."""


class Address(NamedTuple):
    """A host name or address (IPv6 without brackets) and a TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, default_port: int) -> Address:
        """Parse `HOST`, `HOST:PORT` or `http://HOST:PORT`; an IPv6 address needs brackets.

        Raises:
            ValueError: another form, or a port outside 1 ... 65535.
        """
        match = re.fullmatch(r"(?:http://)?(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?/?", text)
        if match is None:
            raise ValueError(f"{text!r} is no address; it must be HOST:PORT, of the server itself, in plain HTTP")
        host, port = match[1].strip("[]"), int(match[2] or default_port)
        if not 1 <= port <= 65535:
            raise ValueError(f"{text!r} has the port {port}; it must be from 1 to 65535")
        return cls(host, port)

    @property
    def metrics(self) -> Address:
        """Triton's default address for metrics: the same host, two ports above the HTTP endpoint."""
        return Address(self.host, self.port + METRICS_PORT - HTTP_PORT)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Response(NamedTuple):
    """clock: the server's time from its Date header, seconds since 1970, rounded up; None without that header."""

    status: int
    clock: float | None
    body: str


class NoAnswerError(Exception):
    """No complete HTTP response; the message is one line and names the address."""


class AnswerTimeoutError(NoAnswerError):
    """The response took longer than the timeout."""


class NoListenerError(NoAnswerError):
    """The connection was refused: no process listens at the address."""


def exchange(
    address: Address,
    method: str,
    path: str,
    seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Send one request (`body` as JSON) and read the whole response within `seconds`.

    Each exchange opens and closes its own connection: Triton waits for idle connections when it shuts down.

    Raises:
        AnswerTimeoutError: it took longer.
        NoListenerError: the connection was refused.
        NoAnswerError: the address is unreachable or doesn't speak HTTP.
    """
    deadline = time.monotonic() + seconds
    # Not urllib, which would use a container's HTTP_PROXY.
    connection = http.client.HTTPConnection(address.host, address.port, timeout=max(seconds, _MIN_TIMEOUT_S))
    defaults = {"Connection": "close"} | ({"Content-Type": "application/json"} if body is not None else {})
    try:
        connection.request(method, path, body, {**(headers or {}), **defaults})
        # The time left after connecting. A server that sends its response byte by byte could exceed it.
        connection.sock.settimeout(max(deadline - time.monotonic(), _MIN_TIMEOUT_S))
        response = connection.getresponse()
        date = parsedate_tz(response.getheader("Date") or "")
        # The header has whole seconds; the current one may be nearly over.
        clock = None if date is None else mktime_tz(date) + 1.0
        return Response(response.status, clock, response.read().decode(errors="replace"))
    except TimeoutError:
        raise AnswerTimeoutError(f"{address} doesn't answer within {seconds:.3g} s") from None
    except (OSError, OverflowError, UnicodeError, http.client.HTTPException) as error:
        text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        kind = NoListenerError if isinstance(error, ConnectionRefusedError) else NoAnswerError
        reason = " ".join(text.split()) or type(error).__name__
        raise kind(f"{address} can't be asked: {reason}") from error
    finally:
        connection.close()
