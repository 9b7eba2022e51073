"""Around every request: its record, a log line, headers; bounds on headers and requests in flight."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence

from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triton_llama_openai.errors import ApiError, error_response
from triton_llama_openai.metrics import Metrics
from triton_llama_openai.record import RequestRecord

LOG = logging.getLogger("triton_llama_openai")
MAX_HEADER_BYTES = 32 << 10
"""Maximum bytes of all headers. uvicorn closes a connection that sends twice as many."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME, _MAX_NAMES = 64, 1024
"""Characters of one field, and of all fields, in a header."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_ABSOLUTE_FORM = re.compile(r"https?://[^/?]*", re.IGNORECASE)


class NormalizeTarget:
    """ASGI middleware: routes see an absolute-form target as its path, `/path/` as `/path`, and HEAD as GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with its path and method normalized.

        The server, which has a scope of its own, sends no body to a HEAD.
        """
        if scope["type"] == "http":
            path = _ABSOLUTE_FORM.sub("", scope["path"], count=1) if scope["path"][:1] != "/" else scope["path"]
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "path": path.rstrip("/") or "/", "method": method}
        await self._app(scope, receive, send)


class RecordRequests:
    """ASGI middleware: makes `request.state.record`, and from it metrics, a log line and headers of the answer.

    records: the records of the requests in flight. log_requests: the setting, none, summary or prompts.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, records: set[RequestRecord], log_requests: str) -> None:
        self._app = app
        self._records = records
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request with a record, of which metrics and a log line are made when its answer ends."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(_request_id(headers), headers.get("x-session-id", ""))
        scope.setdefault("state", {})["record"] = record

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                response_headers = MutableHeaders(scope=message)
                # The second is Anthropic's.
                response_headers["x-request-id"] = response_headers["request-id"] = record.id
                if record.ignored:
                    response_headers["x-ignored-parameters"] = _header_of(record.ignored)
            await send(message)

        # A scrape doesn't count itself.
        counted = int(scope["path"] != "/metrics")
        self._metrics.in_flight.inc(counted)
        self._records.add(record)
        try:
            await self._app(scope, receive, send_recorded)
        finally:
            self._metrics.in_flight.dec(counted)
            self._records.discard(record)
            self._report(scope, record)

    def _report(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.arrived
        # Paths that clients make up would each be a time series.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.requests.labels(route, str(record.status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if record.first_token_seconds is not None:
            self._metrics.first_token_seconds.labels(route).observe(record.first_token_seconds)
        self._metrics.tokens.labels("prompt").inc(record.prompt_tokens)
        self._metrics.tokens.labels("completion").inc(record.completion_tokens)
        resumptions = Counter(interruption.outcome for interruption in record.interruptions)
        for outcome, count in resumptions.items():
            self._metrics.resumptions.labels(outcome).inc(count)
        if self._log_requests != "none" and scope["method"] == "POST":
            counts = f"prompt {record.prompt_tokens}, completion {record.completion_tokens} tokens"
            counts += "".join(f", {outcome} {count} times" for outcome, count in resumptions.items())
            has_prompt = self._log_requests == "prompts" and record.prompt is not None
            prompt = f", prompt {record.prompt!r}" if has_prompt else ""
            LOG.info("%s %s: %s, %.3f s, %s%s", record.id, route, record.status, seconds, counts, prompt)


def _header_of(names: Sequence[str]) -> str:
    """Return names as a header's value; of unknown fields, they can have any text."""
    shown = [_NOT_IN_NAMES.sub("?", name[:_MAX_NAME]) for name in names]
    value = ", ".join(shown)
    return value if len(value) <= _MAX_NAMES else value[:_MAX_NAMES].rpartition(", ")[0] + ", ..."


def _request_id(headers: Headers) -> str:
    """Return the client's id of the request, if a log line can hold it, else a new one."""
    client_id = headers.get("x-request-id", "")
    return client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex


class HeaderLimit:
    """ASGI middleware that refuses requests with large headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request, or answer 431."""
        app = self._app
        if sum(len(name) + len(value) for name, value in scope.get("headers", [])) > MAX_HEADER_BYTES:
            message = f"the request's headers are too large; they must be at most {MAX_HEADER_BYTES} bytes"
            app = error_response(ApiError(431, message, None, "headers_too_large"), scope)
        await app(scope, receive, send)


def limited_route(max_requests: int) -> type[APIRoute]:
    """Return a class of routes that together run `max_requests` requests; one more is refused with 503.

    A request counts from before its body to the end of its answer.
    """
    running = 0

    class LimitedRoute(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal running
            if running >= max_requests:
                raise ApiError(503, f"{max_requests} requests are in flight; try again later", None, "overloaded")
            running += 1
            try:
                await super().handle(scope, receive, send)
            finally:
                running -= 1

    return LimitedRoute
