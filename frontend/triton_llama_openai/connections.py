"""Bounds on connections, which uvicorn has none of: their number, the bytes of headers, the seconds without a request.

Health and metrics are answered beyond the number, so that an orchestrator doesn't end a process that is only busy.
"""

from __future__ import annotations

import asyncio
import json
import logging

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from triton_llama_openai.errors import ApiError, error_response
from triton_llama_openai.settings import Settings

LOG = logging.getLogger("triton_llama_openai")
LARGEST_HEAD = 64 << 10
"""Bytes of a request that are no body; what one read brings may come on top."""

PROBES = 64
"""Connections beyond the bound. The oldest one makes room for one more."""

_PROBED = ("/health", "/health/live", "/metrics")
_PROBE_S = 5.0
# Longer than clients and proxies keep idle connections: one that closes first may lose a request.
_KEEP_ALIVE_S = 75


def make_server(app: ASGIApp, settings: Settings) -> uvicorn.Server:
    """Return the server of an application, with the settings' bounds on connections."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            # uvloop: half of asyncio's TTFT under load (perf/LOG.md).
            loop="auto",
            http=_protocol(settings.max_connections, settings.body_timeout),
            ws="none",
            lifespan="on",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=settings.grace,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
    )


def _protocol(most_connections: int, seconds: float) -> type[asyncio.Protocol]:
    """Return the protocol of one server's connections. seconds: for a request's headers to arrive."""

    class Bounded(BoundedProtocol):
        most = most_connections
        head_s = seconds

    Bounded.probes = {}
    return Bounded


class BoundedProtocol(HttpToolsProtocol):
    """A connection that is closed where its client keeps it without a request.

    most: connections; probes: those beyond, the oldest first. head_s: seconds.
    """

    most: int
    head_s: float
    probes: dict[BoundedProtocol, None]

    _timer: asyncio.TimerHandle | None = None
    _unread = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Take the connection, beyond the bound for probes only."""
        super().connection_made(transport)
        beyond = len(self.connections) - len(self.probes) > self.most
        if beyond:
            self._take_probe()
        self._expire_in(min(self.head_s, _PROBE_S) if beyond else self.head_s)

    def _take_probe(self) -> None:
        if not self.probes:
            LOG.warning("%s connections are open; one more is answered about health and metrics only", self.most)
        elif len(self.probes) >= PROBES:
            oldest = next(iter(self.probes))
            del self.probes[oldest]
            oldest.transport.abort()
        self.probes[self] = None
        self.app = _for_probes(self.app, self.most)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self.probes.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come; refuse headers and trailers beyond the bound."""
        # Not in on_header: the parser calls it at the end of a header only.
        self._unread += len(data)
        super().data_received(data)
        if self._unread > LARGEST_HEAD and not self.transport.is_closing():
            self._refuse_head()

    def on_headers_complete(self) -> None:
        """Begin the request."""
        self._unread = 0
        self._stop_timer()
        # For a client that doesn't read: its connection can't be closed in order.
        self.scope["state"]["abort"] = self.transport.abort
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Take a part of the body, which the application bounds."""
        self._unread = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        """Await the next request. uvicorn's own timer ends with any byte, and waits for unsent ones."""
        self._expire_in(_KEEP_ALIVE_S + self.head_s)
        super().on_response_complete()

    def _refuse_head(self) -> None:
        if self._is_idle():
            message = f"the request's headers are too large; they must be at most {LARGEST_HEAD} bytes"
            body = json.dumps(ApiError(431, message, None, "headers_too_large").body()).encode()
            head = "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expire_in(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._expire)

    def _expire(self) -> None:
        # A pipelined request runs after the response that has set the timer.
        if self._is_idle():
            self.transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _for_probes(app: ASGIApp, most: int) -> ASGIApp:
    """Return an application that answers one request: about health and metrics, else with 503."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        if scope["path"] in _PROBED:
            await app(scope, receive, closing)
            return
        error = ApiError(503, f"{most} connections are open; try again later", None, "overloaded", 1)
        await error_response(error)(scope, receive, closing)

    return answer
