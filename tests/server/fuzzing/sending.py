"""Attacks, and sending one: it ends in an answer or a closed connection within a time limit, or is a finding.

After an incomplete request the client closes its sending direction and waits for the server.
"""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Literal

import grpc
from triton_local.server import LocalTriton

TIMEOUT_S = 60.0
"""For an answer, or for the end of a connection."""

_GRACE_S = 0.05
"""How long a client with an incomplete request waits for an answer before it closes its direction."""

_RECEIVE_BYTES = 65536


@dataclass(frozen=True)
class HttpBytes:
    """Bytes for the HTTP port. whole: a complete request; otherwise the client closes its direction afterwards."""

    raw: bytes
    whole: bool


@dataclass(frozen=True)
class GrpcBytes:
    """Bytes for the gRPC port; the client closes its direction afterwards."""

    raw: bytes


@dataclass(frozen=True)
class GrpcCall:
    """A call with serialized messages, or what should be some. streams: of the method's kind; else one message."""

    method: str
    messages: tuple[bytes, ...]
    streams: bool = False


Attack = HttpBytes | GrpcBytes | GrpcCall

Kind = Literal["answered", "closed", "hung", "gone"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of an attack. said: a status. hung: nothing came in time. gone: the server refuses connections."""

    kind: Kind
    said: str = ""


class Sender:
    """Sends attacks one after another; gRPC calls share a connection, every other attack has its own."""

    def __init__(self, server: LocalTriton) -> None:
        host, port = server.http_url.split(":")
        self._http = (host, int(port))
        host, port = server.grpc_url.split(":")
        self._grpc = (host, int(port))
        self._channel = grpc.insecure_channel(server.grpc_url)

    def close(self) -> None:
        """Close the connection of the gRPC calls."""
        self._channel.close()

    def send(self, attack: Attack) -> Outcome:
        """Send an attack and wait for its outcome."""
        if isinstance(attack, GrpcCall):
            return self._call(attack)
        try:
            if isinstance(attack, HttpBytes):
                return _ask(self._http, attack)
            return _talk(self._grpc, attack)
        except TimeoutError:
            return Outcome("hung")
        except ConnectionRefusedError:
            return Outcome("gone")
        except OSError as error:
            # Reset, or closed while we were still sending.
            return Outcome("closed", type(error).__name__)

    def _call(self, attack: GrpcCall) -> Outcome:
        try:
            if attack.streams:
                answers = self._channel.stream_stream(attack.method)(iter(attack.messages), timeout=TIMEOUT_S)
                return Outcome("answered", f"{sum(1 for _ in answers)} responses")
            (message,) = attack.messages
            self._channel.unary_unary(attack.method)(message, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            code = error.code()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Outcome("hung")
            refused = code is grpc.StatusCode.UNAVAILABLE and "onnect" in str(error.details())
            return Outcome("gone") if refused else Outcome("answered", code.name)
        return Outcome("answered", "OK")


def _ask(address: tuple[str, int], attack: HttpBytes) -> Outcome:
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(attack.raw)
        if not attack.whole and not _answer_comes(connection):
            connection.shutdown(socket.SHUT_WR)
        response = HTTPResponse(connection, method="HEAD" if attack.raw.startswith(b"HEAD") else "POST")
        try:
            response.begin()
            response.read()
        except (HTTPException, ValueError) as error:
            # Closed without an answer, in the middle of it, or something else than HTTP came.
            return Outcome("closed", type(error).__name__)
        finally:
            response.close()
        return Outcome("answered", str(response.status))


def _talk(address: tuple[str, int], attack: GrpcBytes) -> Outcome:
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        connection.sendall(attack.raw)
        # What comes at once is gRPC's own greeting.
        _answer_comes(connection)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(_RECEIVE_BYTES):
            pass
    return Outcome("closed")


def _answer_comes(connection: socket.socket) -> bool:
    """Wait for _GRACE_S, and return whether data or the end of the stream has come."""
    ready, _, _ = select.select([connection], [], [], _GRACE_S)
    return bool(ready)
