"""What is soaked: a server and the OpenAI endpoint in front of it, which can be started again at the same addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Literal, Self

from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.ports import HeldPorts, Service
from triton_local.server import LocalTriton

from perf.soak import resources

HOST = "127.0.0.1"

Part = Literal["server", "endpoint"]
"""What is started again; with the server the endpoint too, as `make serve` does."""


class Stack:
    """A server, started by `make` with these ports, and the endpoint; a context manager, which ends both.

    The ports are held throughout, so that no other process gets one while the server is down. model: the endpoint's,
    as the server's.
    """

    server: LocalTriton
    endpoint: OpenAIEndpoint

    def __init__(self, make: Callable[[Mapping[Service, int]], LocalTriton], model: str | None = None) -> None:
        self._make = make
        self._model = model
        self._held = HeldPorts(HOST, {"http": 0, "grpc": 0, "metrics": 0, "openai": 0})

    def __enter__(self) -> Self:
        self.start("server")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.endpoint.stop()
        self.server.stop()
        self._held.close()

    def stop(self, part: Part) -> dict[str, float | None]:
        """End a part as SIGTERM to the launcher does: the endpoint first, then the server.

        code: of its process. regions: of shared memory that it left. end_seconds: until it had ended.
        """
        began = time.monotonic()
        self.endpoint.stop()
        code, regions = self.endpoint.exit_code, 0
        if part == "server":
            prefixes = resources.region_prefixes(self.server.pid)
            self.server.stop()
            code = code or self.server.exit_code
            regions = len(resources.regions(prefixes))
        return {"code": code, "regions": regions, "end_seconds": time.monotonic() - began}

    def start(self, part: Part) -> None:
        """Start a part, at its old addresses if it was there before. Raises a LauncherError."""
        if part == "server":
            self.server = self._make(self._held.numbers)
            self.server.start()
        self.endpoint = OpenAIEndpoint(HOST, self._held.numbers["openai"], self.server.exit_timeout, self._model)
        self.endpoint.start(self.server.grpc_url, lambda line: print(line, flush=True))
