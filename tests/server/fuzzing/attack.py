"""An attack, other than a documented call, and the outcome of any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

TIMEOUT_S = 60.0
"""For an answer, or for the end of a connection."""

HUNG = "hung"
GONE = "gone"
"""The server refuses connections."""

CLOSED = "closed"
"""Without an answer, or in the middle of one."""

CONTROL = "restricted"
"""The beginning of routes that need the supervisor's key."""

Form = Literal["request", "odd request", "incomplete"]
"""A request that HTTP allows and Triton has to answer; one that it may close the connection for; or something that
isn't complete, after which the client closes its direction.
"""


@dataclass(frozen=True)
class RawBytes:
    """Bytes for a port. route: for counts."""

    route: str
    port: Literal["http", "grpc"]
    raw: bytes
    form: Form = "incomplete"


@dataclass(frozen=True)
class GrpcCall:
    """A call with serialized messages, or what should be some. streams: of the method's kind; else one message."""

    route: str
    method: str
    messages: tuple[bytes, ...]
    streams: bool = False
    metadata: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What an attack got. status: HTTP's or gRPC's, or HUNG, GONE, CLOSED. said: its errors.

    undocumented: how the answer differs from the OpenAPI document.
    """

    status: str
    said: tuple[str, ...] = ()
    undocumented: str = ""


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
