"""One HTTP exchange with the server: in plain HTTP/1.1, past any proxy, and bounded in time.

Every exchange has a connection of its own and asks the server to close it: an idle one would hold a server up that is
told to stop. Knows nothing about what is asked.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping
from email.utils import mktime_tz, parsedate_tz
from typing import NamedTuple

from triton_llama.health.address import Address

_SHORTEST = 0.05
"""Seconds that an exchange gets at least: a socket without any time doesn't wait at all."""


class Response(NamedTuple):
    """An answer. clock: the server's time by its Date header, seconds since 1970 (or 1 s more); None if it has none."""

    status: int
    clock: float | None
    body: str


class NoAnswerError(Exception):
    """No answer came, or half of one. The message is one line and names the address."""


class TooLateError(NoAnswerError):
    """Nothing speaks against an answer but the time."""


class NobodyListensError(NoAnswerError):
    """The connection was refused: nobody listens there, not yet or not any more."""


def exchange(
    address: Address,
    method: str,
    path: str,
    seconds: float,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Send one request, with `body` as JSON and `headers` beside its own, and read the whole answer.

    Raises:
        TooLateError: it didn't come within `seconds`.
        NobodyListensError: the connection was refused.
        NoAnswerError: the address can't be reached, or doesn't speak HTTP.
    """
    deadline = time.monotonic() + seconds
    # Not urllib: it would go through the HTTP_PROXY of a container, which is meant for downloads.
    connection = http.client.HTTPConnection(address.host, address.port, timeout=max(seconds, _SHORTEST))
    own = {"Connection": "close"} | ({"Content-Type": "application/json"} if body is not None else {})
    try:
        connection.request(method, path, body, {**(headers or {}), **own})
        # What is left after connecting. A server that sends its answer byte by byte could take longer.
        connection.sock.settimeout(max(deadline - time.monotonic(), _SHORTEST))
        answer = connection.getresponse()
        date = parsedate_tz(answer.getheader("Date") or "")
        # It names whole seconds, and this one may be nearly over.
        clock = None if date is None else mktime_tz(date) + 1.0
        return Response(answer.status, clock, answer.read().decode(errors="replace"))
    except TimeoutError:
        raise TooLateError(f"{address} doesn't answer within {seconds:.3g} s") from None
    except (OSError, OverflowError, UnicodeError, http.client.HTTPException) as error:
        kind = NobodyListensError if isinstance(error, ConnectionRefusedError) else NoAnswerError
        raise kind(f"{address} can't be asked: {_reason(error)}") from error
    finally:
        connection.close()


def _reason(error: Exception) -> str:
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(said.split()) or type(error).__name__
