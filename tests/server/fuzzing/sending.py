"""Sending one attack, and what came of it: an answer or a closed connection, within bounds, or else a finding.

Whoever has sent half of something hangs up its own direction, and waits: from then on the server knows that nothing
more comes.
"""

from __future__ import annotations

import select
import socket
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Literal

import grpc
from server.fuzzing.attacks import Attack, GrpcBytes, GrpcCall, HttpBytes
from triton_local.server import LocalTriton

TIMEOUT_S = 60.0
"""For an answer, or for the end of a connection."""

_GRACE_S = 0.05
"""How long somebody who has sent half of something waits for an answer before hanging up."""

_RECEIVE_BYTES = 65536

Kind = Literal["answered", "closed", "hung", "gone"]


@dataclass(frozen=True)
class Outcome:
    """What came of an attack. said: a status. hung: nothing came in time. gone: there is no server any more."""

    kind: Kind
    said: str = ""


class Sender:
    """Sends attacks one after another, each over a connection of its own but for gRPC calls, which share one."""

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
        """Send it, and wait for what comes of it."""
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
    """Wait for a moment, and return whether something has come, if only the end."""
    ready, _, _ = select.select([connection], [], [], _GRACE_S)
    return bool(ready)
