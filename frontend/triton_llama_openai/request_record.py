"""One record for each request: it becomes metrics, a log line and the answer's headers."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triton_llama_openai.metrics import Metrics

LOG = logging.getLogger("triton_llama_openai")
CLIENT_LEFT = 499
"""nginx's status for a client that left before its answer."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclass
class RequestRecord:
    """What is known of a request. first_text: seconds from arrival, of a stream. ignored: fields without effect."""

    id: str
    arrived: float = field(default_factory=time.perf_counter)
    status: int = 500
    first_text: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt: object = None
    ignored: list[str] = field(default_factory=list)

    def saw_text(self) -> None:
        """Note the time of a stream's first text."""
        if self.first_text is None:
            self.first_text = time.perf_counter() - self.arrived


class Recording:
    """ASGI middleware: gives each request a record, as `request.state.record`, and evaluates it at the end."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log_requests: str) -> None:
        self._app = app
        self._metrics = metrics
        self._log = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["record"] = record

        async def recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.id
                if record.ignored:
                    headers["x-ignored-parameters"] = ", ".join(record.ignored)
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, recorded)
        finally:
            self._metrics.in_flight.dec()
            self._evaluate(scope, record)

    def _evaluate(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.arrived
        # Paths that clients make up would each be a time series.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.requests.labels(route, str(record.status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if record.first_text is not None:
            self._metrics.first_token_seconds.labels(route).observe(record.first_text)
        self._metrics.tokens.labels("prompt").inc(record.prompt_tokens)
        self._metrics.tokens.labels("completion").inc(record.completion_tokens)
        if self._log != "none" and scope["method"] == "POST":
            counts = f"prompt {record.prompt_tokens}, completion {record.completion_tokens} tokens"
            prompt = f", prompt {record.prompt!r}" if self._log == "prompts" and record.prompt is not None else ""
            LOG.info("%s %s: %s, %.3f s, %s%s", record.id, route, record.status, seconds, counts, prompt)


def _request_id(headers: Headers) -> str:
    """Return the client's own id, if it is one that a log line can hold, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
