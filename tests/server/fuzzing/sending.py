"""Sends an attack, and waits for what comes of it.

After an incomplete request the client closes its sending direction and waits for the server.
"""

from __future__ import annotations

import select
import socket
from http.client import HTTPException, HTTPResponse

import grpc
from server.fuzzing.attack import CLOSED, GONE, HUNG, TIMEOUT_S, GrpcCall, Outcome, RawBytes, errors
from server.fuzzing.documented import DocumentedCall, call
from triton_local.server import LocalTriton
from tritonclient.grpc import service_pb2

_GRACE_S = 0.05
"""How long a client with an incomplete request waits for an answer before it closes its direction."""

Attack = RawBytes | GrpcCall | DocumentedCall


def send(server: LocalTriton, channel: grpc.Channel, attack: Attack) -> Outcome:
    """Return the outcome of an attack. channel: to the server's gRPC port."""
    if isinstance(attack, DocumentedCall):
        return call(server, attack)
    return _call(channel, attack) if isinstance(attack, GrpcCall) else _talk(server, attack)


def _call(channel: grpc.Channel, attack: GrpcCall) -> Outcome:
    said: list[str] = []
    options = {"timeout": TIMEOUT_S, "metadata": attack.metadata}
    try:
        if attack.streams:
            for answer in channel.stream_stream(attack.method)(iter(attack.messages), **options):
                error = service_pb2.ModelStreamInferResponse.FromString(answer).error_message
                said += [error] if error else []
        else:
            (message,) = attack.messages
            channel.unary_unary(attack.method)(message, **options)
    except grpc.RpcError as error:
        code, details = error.code(), str(error.details())
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return Outcome(HUNG, tuple(said))
        if code is grpc.StatusCode.UNAVAILABLE and "onnect" in details:
            return Outcome(GONE, tuple(said))
        return Outcome(code.name, (*said, details))
    return Outcome("OK", tuple(said))


def _talk(server: LocalTriton, attack: RawBytes) -> Outcome:
    host, port = (server.http_url if attack.port == "http" else server.grpc_url).split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as connection:
            connection.sendall(attack.raw)
            # What comes at once from the gRPC port is its own greeting.
            answered = attack.form != "incomplete" or select.select([connection], [], [], _GRACE_S)[0]
            if attack.port == "grpc" or not answered:
                connection.shutdown(socket.SHUT_WR)
            if attack.port == "grpc":
                while connection.recv(65536):
                    pass
                return Outcome(CLOSED)
            with HTTPResponse(connection, method="HEAD" if attack.raw.startswith(b"HEAD") else "POST") as response:
                response.begin()
                return Outcome(str(response.status), tuple(errors(response.read())))
    except TimeoutError:
        return Outcome(HUNG)
    except ConnectionRefusedError:
        return Outcome(GONE)
    except (OSError, HTTPException, ValueError):
        # Reset, closed without an answer or in the middle of it, or something else than HTTP came.
        return Outcome(CLOSED)
