"""Attacks on a server over several connections at a time, with valid requests in between.

An attack ends in an answer or a closed connection within a time limit, or is a finding. After an incomplete request the
client closes its sending direction and waits for the server.
"""

from __future__ import annotations

import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPResponse
from typing import Literal

import grpc
from server.clients import Answer
from triton_local.server import LocalTriton

WORKERS = 8
"""Connections at a time, to each server."""

GOOD_EVERY = 20
"""One request in 20 is a valid one."""

MOST_HUNG = 3
"""Attacks that hang before the campaign ends: each takes a minute, and a few show the cause."""

TIMEOUT_S = 60.0
"""For an answer, or for the end of a connection."""

_REMEMBERED = 3 * WORKERS
"""Attacks that a report names when the server has gone: one may have broken what the next one met."""

_GRACE_S = 0.05
"""How long a client with an incomplete request waits for an answer before it closes its direction."""


@dataclass(frozen=True)
class RawBytes:
    """Bytes for a port. whole: a complete HTTP request; otherwise the client closes its direction afterwards."""

    port: Literal["http", "grpc"]
    raw: bytes
    whole: bool = False


@dataclass(frozen=True)
class GrpcCall:
    """A call with serialized messages, or what should be some. streams: of the method's kind; else one message."""

    method: str
    messages: tuple[bytes, ...]
    streams: bool = False


Attack = RawBytes | GrpcCall
Good = tuple[Callable[[], Answer], Answer]
"""A valid request and its known answer."""


@dataclass
class Campaign:
    """Attacks on one server. good: requests sent in between, in turn. outcomes: by kind and status.

    hung, spoiled, gone: findings; the last are the attacks sent before the server had gone.
    """

    server: LocalTriton
    good: Sequence[Good]
    outcomes: Counter[str] = field(default_factory=Counter)
    sent: list[Attack] = field(default_factory=list)
    asked: int = 0
    hung: list[Attack] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)
    gone: list[Attack] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, attacks: Sequence[Attack]) -> None:
        """Send them all; the rest is dropped once the server is gone or hangs repeatedly."""
        with grpc.insecure_channel(self.server.grpc_url) as channel, ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda attack: self._send(attack, channel), attacks))

    def line(self) -> str:
        """Return the outcomes, for the end of a run."""
        outcomes = ", ".join(f"{count} {said}" for said, count in sorted(self.outcomes.items()))
        return f"{len(self.sent)} attacks and {self.asked} good requests: {outcomes}"

    def _send(self, attack: Attack, channel: grpc.Channel) -> None:
        if self.gone or len(self.hung) >= MOST_HUNG:
            return
        with self._lock:
            self.sent.append(attack)
            number = len(self.sent)
        outcome = _call(channel, attack) if isinstance(attack, GrpcCall) else _talk(self.server, attack)
        with self._lock:
            self.outcomes[outcome] += 1
            if outcome == "hung":
                self.hung.append(attack)
            if outcome == "gone" or self.server.exit_code is not None:
                self.gone = self.gone or self.sent[-_REMEMBERED:]
        if number % GOOD_EVERY == 0 and not self.gone:
            self._ask(number // GOOD_EVERY)

    def _ask(self, number: int) -> None:
        ask, expected = self.good[number % len(self.good)]
        try:
            answer: object = ask()
        except Exception as error:  # noqa: BLE001 - any error spoils this request only
            answer = error
        with self._lock:
            self.asked += 1
            self.spoiled += [] if answer == expected else [f"{answer!r} instead of {expected}"]


def _call(channel: grpc.Channel, attack: GrpcCall) -> str:
    """Return the outcome of a call: answered with a status, hung, or gone: the server refuses connections."""
    try:
        if attack.streams:
            answers = channel.stream_stream(attack.method)(iter(attack.messages), timeout=TIMEOUT_S)
            return f"answered {sum(1 for _ in answers)} responses"
        (message,) = attack.messages
        channel.unary_unary(attack.method)(message, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return "hung"
        refused = code is grpc.StatusCode.UNAVAILABLE and "onnect" in str(error.details())
        return "gone" if refused else f"answered {code.name}"
    return "answered OK"


def _talk(server: LocalTriton, attack: RawBytes) -> str:
    """Return the outcome of bytes: answered or closed with a status, hung, or gone."""
    host, port = (server.http_url if attack.port == "http" else server.grpc_url).split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(attack.raw)
            # What comes at once from the gRPC port is its own greeting.
            answered = attack.whole or select.select([connection], [], [], _GRACE_S)[0]
            if attack.port == "grpc" or not answered:
                connection.shutdown(socket.SHUT_WR)
            if attack.port == "grpc":
                while connection.recv(65536):
                    pass
                return "closed"
            with HTTPResponse(connection, method="HEAD" if attack.raw.startswith(b"HEAD") else "POST") as response:
                response.begin()
                response.read()
                return f"answered {response.status}"
    except TimeoutError:
        return "hung"
    except ConnectionRefusedError:
        return "gone"
    except (OSError, HTTPException, ValueError) as error:
        # Reset, closed without an answer or in the middle of it, or something else than HTTP came.
        return f"closed {type(error).__name__}"
