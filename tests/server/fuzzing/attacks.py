"""What is sent to a server, and the outcome: bytes for a port, or a gRPC call. documented.py has documented calls."""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from typing import Literal, Protocol

import grpc
from triton_local.server import LocalTriton
from tritonclient.grpc import service_pb2

TIMEOUT_S = 60.0
"""For an answer, or for the end of a connection."""

HUNG = "hung"
GONE = "gone"
"""The server refuses connections."""

CLOSED = "closed"
"""Without an answer, or in the middle of one."""

CONTROL = "restricted"
"""The beginning of routes that need the supervisor's key."""

_GRACE_S = 0.05
"""How long a client with an incomplete request waits for an answer before it closes its direction."""

Form = Literal["request", "odd request", "incomplete"]
"""A request that HTTP allows and Triton has to answer; one that it may close the connection for; or something that
isn't complete, after which the client closes its direction and waits for the server.
"""


@dataclass(frozen=True)
class Outcome:
    """What an attack got. status: HTTP's or gRPC's, or HUNG, GONE, CLOSED. said: its errors.

    undocumented: how the answer differs from the OpenAPI document.
    """

    status: str
    said: tuple[str, ...] = ()
    undocumented: str = ""


class Attack(Protocol):
    """Something hostile. route: for counts."""

    @property
    def route(self) -> str: ...

    def send(self, server: LocalTriton, channel: grpc.Channel) -> Outcome:
        """Send it, and wait for what comes of it. channel: to the server's gRPC port."""


@dataclass(frozen=True)
class RawBytes:
    """Bytes for a port."""

    route: str
    port: Literal["http", "grpc"]
    raw: bytes
    form: Form = "incomplete"

    def send(self, server: LocalTriton, channel: grpc.Channel) -> Outcome:
        host, port = (server.http_url if self.port == "http" else server.grpc_url).split(":")
        try:
            with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
                return self._talk(connection)
        except TimeoutError:
            return Outcome(HUNG)
        except ConnectionRefusedError:
            return Outcome(GONE)
        except (OSError, HTTPException, ValueError):
            # Reset, closed without an answer or in the middle of it, or something else than HTTP came.
            return Outcome(CLOSED)

    def _talk(self, connection: socket.socket) -> Outcome:
        connection.sendall(self.raw)
        if self.port == "grpc":
            # What comes at once is the server's own greeting.
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass
            return Outcome(CLOSED)
        if self.form == "incomplete" and not select.select([connection], [], [], _GRACE_S)[0]:
            connection.shutdown(socket.SHUT_WR)
        with HTTPResponse(connection, method="HEAD" if self.raw.startswith(b"HEAD") else "POST") as response:
            response.begin()
            return Outcome(str(response.status), tuple(errors(response.read())))


@dataclass(frozen=True)
class GrpcCall:
    """A call with serialized messages, or what should be some. streams: of the method's kind; else one message."""

    route: str
    method: str
    messages: tuple[bytes, ...]
    streams: bool = False
    metadata: tuple[tuple[str, str], ...] = ()

    def send(self, server: LocalTriton, channel: grpc.Channel) -> Outcome:
        said: list[str] = []
        options = {"timeout": TIMEOUT_S, "metadata": self.metadata}
        try:
            if self.streams:
                for answer in channel.stream_stream(self.method)(iter(self.messages), **options):
                    error = service_pb2.ModelStreamInferResponse.FromString(answer).error_message
                    said += [error] if error else []
            else:
                (message,) = self.messages
                channel.unary_unary(self.method)(message, **options)
        except grpc.RpcError as error:
            code, details = error.code(), str(error.details())
            if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                return Outcome(HUNG, tuple(said))
            if code is grpc.StatusCode.UNAVAILABLE and "onnect" in details:
                return Outcome(GONE, tuple(said))
            return Outcome(code.name, (*said, details))
        return Outcome("OK", tuple(said))


def errors(body: bytes) -> Iterator[str]:
    """Yield the errors of a body: JSON, events, or something without any."""
    for line in body.splitlines():
        try:
            content = json.loads(line.removeprefix(b"data: "))
        except ValueError:
            # Binary tensors, or an empty line.
            continue
        if isinstance(content, dict) and "error" in content:
            yield str(content["error"])
