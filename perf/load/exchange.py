"""One request over one connection of its own, with the time of everything that comes back.

A connection each, because a kept one may be closed by the server just when it is used again; on this machine it costs
a fraction of a millisecond, the same for every server. There is no second try: whatever goes wrong is in the record.
To be used in locust's process, where a socket that waits lets the other requests go on.
"""

from __future__ import annotations

import socket
import time
from http.client import HTTPException
from urllib.parse import urlsplit

from geventhttpclient.response import HTTPResponse

from perf.load.answers import Answer, AnswerError, answer_of
from perf.load.asking import body, path
from perf.load.plan import Asked
from perf.load.records import TIME_OVER, Record
from perf.load.target import Target

_RECEIVE_BYTES = 65536


class Clock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._began


def exchange(target: Target, request: Asked, clock: Clock, scheduled: float, deadline: float) -> Record:
    """Send the request and read its answer, until `deadline` at most; what goes wrong is in the record."""
    answer = answer_of(target.protocol)
    sent = clock.now()
    if sent >= deadline:
        return _record(answer, scheduled, None, sent, f"not sent: {TIME_OVER}")
    error = ""
    try:
        _converse(target, request, answer, clock, deadline)
        if answer.output_tokens != request.output_tokens:
            error = f"{answer.output_tokens} tokens came, {request.output_tokens} were asked for"
    except TimeoutError:
        error = f"no whole answer when {TIME_OVER}, {clock.now() - sent:.1f} s after it was sent"
    except OSError as failure:
        error = f"connection failed: {failure.strerror or failure}"
    except AnswerError as failure:
        error = str(failure)
    return _record(answer, scheduled, sent, clock.now(), error)


def _converse(target: Target, request: Asked, answer: Answer, clock: Clock, deadline: float) -> None:
    where = urlsplit(target.url)
    assert where.hostname is not None, target.url
    response = _Response()
    with socket.create_connection((where.hostname, where.port or 80), timeout=deadline - clock.now()) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_message(target, request))
        while not response.message_complete:
            remaining = deadline - clock.now()
            if remaining <= 0:
                raise TimeoutError
            connection.settimeout(remaining)
            received = connection.recv(_RECEIVE_BYTES)
            now = clock.now()
            _feed(response, received)
            if response.headers_complete and response.get_code() == 200:
                answer.feed(response.take(), now)
    if response.get_code() != 200:
        raise AnswerError(f"HTTP {response.get_code()}: {response.take()[:200].decode(errors='replace').strip()}")
    answer.end(clock.now())


def _feed(response: HTTPResponse, received: bytes) -> None:
    try:
        # Nothing received is the connection's end: of the answer too, or too early.
        response.feed(received)
    except HTTPException as error:
        if received:
            raise AnswerError(f"the answer is no HTTP: {error}") from error
        raise AnswerError("the server closed the connection before its answer was whole") from error
    if not received and not response.message_complete:
        raise AnswerError("the server closed the connection before its answer was whole")


class _Response(HTTPResponse):
    """geventhttpclient's parser, its body handed out as it comes."""

    def __init__(self) -> None:
        super().__init__(method="POST")
        self._body = bytearray()

    def take(self) -> bytes:
        """Return the body's bytes that came since the last time."""
        taken, self._body = bytes(self._body), bytearray()
        return taken

    def _on_body(self, buf: bytearray) -> None:
        self._body += buf


def _message(target: Target, request: Asked) -> bytes:
    content = body(target, request)
    head = (
        f"POST {path(target)} HTTP/1.1\r\n"
        f"Host: {urlsplit(target.url).netloc}\r\n"
        "Content-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + content


def _record(answer: Answer, scheduled: float, sent: float | None, ended: float, error: str) -> Record:
    return Record(
        scheduled=scheduled,
        sent=sent,
        first_token=answer.first_token,
        last_token=answer.last_token,
        ended=ended,
        token_times=tuple(answer.token_times),
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        error=error,
    )
