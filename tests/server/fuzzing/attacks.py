"""What one fuzzing client does to a server: bytes for the HTTP port, calls or bytes for the gRPC port.

How attacks are made up is `http_requests.py`'s, `grpc_calls.py`'s and `noise.py`'s business; how they are sent and what
must come of them `sending.py`'s.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HttpBytes:
    """Bytes for the HTTP port. whole: they are a request by themselves; otherwise the client hangs up behind them."""

    raw: bytes
    whole: bool


@dataclass(frozen=True)
class GrpcBytes:
    """Bytes for the gRPC port, behind which the client hangs up."""

    raw: bytes


@dataclass(frozen=True)
class GrpcCall:
    """A call with serialized messages, or what should be some. streams: of the method's kind; else one message."""

    method: str
    messages: tuple[bytes, ...]
    streams: bool = False


Attack = HttpBytes | GrpcBytes | GrpcCall
