"""What is soaked: a server and the OpenAI endpoint in front of it, which can be started again at the same addresses."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

from triton_local.openai_endpoint import OpenAIEndpoint
from triton_local.ports import HeldPorts, Service
from triton_local.server import LocalTriton

from perf.soak import resources

HOST = "127.0.0.1"

Part = Literal["server", "endpoint"]
"""What is started again; with the server the endpoint too, as `make serve` does."""


@dataclass(frozen=True)
class Stopped:
    """The end of a part. code: of its process. regions: of shared memory that it left. seconds: until it had ended."""

    code: int | None
    regions: int
    seconds: float


class Stack:
    """A server, started by `make` with these ports, and the endpoint; a context manager, which ends both.

    The ports are held throughout, so that no other process gets one while the server is down.
    """

    def __init__(
        self,
        make: Callable[[Mapping[Service, int]], LocalTriton] | None,
        server: LocalTriton | None,
        model: str | None,
    ) -> None:
        self._make = make
        self._model = model
        self._held: HeldPorts | None = None
        self._server = server
        self._endpoint: OpenAIEndpoint | None = None

    @classmethod
    def of(cls, make: Callable[[Mapping[Service, int]], LocalTriton], model: str | None = None) -> Self:
        """Return a stack that is started on entering it. model: the endpoint's, as the server's."""
        return cls(make, None, model)

    @classmethod
    def around(cls, server: LocalTriton) -> Self:
        """Return a stack of a server that runs already, without an endpoint; nothing can be started again."""
        return cls(None, server, None)

    @property
    def server(self) -> LocalTriton:
        """The server that runs now."""
        assert self._server is not None
        return self._server

    @property
    def endpoint(self) -> OpenAIEndpoint | None:
        """The endpoint that runs now, if there is one."""
        return self._endpoint

    @property
    def restarts(self) -> bool:
        """Whether its parts can be started again."""
        return self._make is not None

    def __enter__(self) -> Self:
        assert self._make is not None
        self._held = HeldPorts(HOST, {"http": 0, "grpc": 0, "metrics": 0, "openai": 0})
        self._start_server()
        self._start_endpoint()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._endpoint is not None:
            self._endpoint.stop()
        if self._server is not None:
            self._server.stop()
        if self._held is not None:
            self._held.close()

    def stop(self, part: Part) -> Stopped:
        """End a part as SIGTERM to the launcher does: the endpoint first, then the server."""
        began = time.monotonic()
        assert self._endpoint is not None
        self._endpoint.stop()
        code, regions = self._endpoint.exit_code, 0
        if part == "server":
            prefixes = resources.region_prefixes(self.server.pid)
            self.server.stop()
            code = code or self.server.exit_code
            regions = len(resources.regions(prefixes))
        return Stopped(code, regions, time.monotonic() - began)

    def start(self, part: Part) -> None:
        """Start a part that was stopped, at its old addresses. Raises a LauncherError."""
        if part == "server":
            self._start_server()
        self._start_endpoint()

    def _start_server(self) -> None:
        assert self._make is not None
        assert self._held is not None
        self._server = self._make(self._held.numbers)
        self._server.start()

    def _start_endpoint(self) -> None:
        assert self._held is not None
        port = self._held.numbers["openai"]
        self._endpoint = OpenAIEndpoint(HOST, port, self.server.exit_timeout, self._model)
        self._endpoint.start(self.server.grpc_url, lambda line: print(line, flush=True))
