"""The OpenAI endpoint in front of a real server, in a thread, for tests of both together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from frontend.endpoints import Endpoint, endpoint
from triton_local.server import LocalTriton


@contextmanager
def in_front_of(server: LocalTriton, **changes: object) -> Iterator[Endpoint]:
    """Serve; `changes`: settings other than the defaults."""
    metrics = {"triton_metrics": server.metrics_address}
    with endpoint(int(server.grpc_address.rpartition(":")[2]), **metrics | changes) as served:
        yield served
