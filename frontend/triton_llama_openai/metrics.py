"""Each request's record: Prometheus metrics (docs/openai.md lists them), a log line, headers of the answer."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections import Counter as Counts
from collections.abc import Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOG = logging.getLogger("triton_llama_openai")
CLIENT_LEFT = 499
"""nginx's status for a client that left before its answer."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME, _MAX_NAMES = 64, 1024
"""Characters of one field, and of all fields, in a header."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One endpoint's metrics, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry(auto_describe=True)
        self.requests = Counter(
            "llama_openai_requests",
            "Requests answered, by route and code; code 499: the client has left before, or has not read its stream.",
            ("route", "code"),
            registry=self._registry,
        )
        self.seconds = Histogram(
            "llama_openai_request_seconds",
            "From a request's arrival to the end of its answer, by route.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_token_seconds = Histogram(
            "llama_openai_time_to_first_token_seconds",
            "From a streamed request's arrival to its first text, by route.",
            ("route",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.tokens = Counter(
            "llama_openai_tokens", "Tokens of prompts and completions, by kind.", ("kind",), registry=self._registry
        )
        self.resumptions = Counter(
            "llama_openai_resumptions",
            "Losses of a request's Triton, or of all of them, by outcome: resumed at once, waited for a Triton, or "
            "given_up.",
            ("outcome",),
            registry=self._registry,
        )
        self.in_flight = Gauge("llama_openai_requests_in_flight", "Requests that run.", registry=self._registry)

    def page(self) -> bytes:
        """Return the page for Prometheus."""
        return bytes(generate_latest(self._registry))


@dataclass
class RequestRecord:
    """One request's figures. first_text: seconds from arrival, of a stream. ignored: fields without effect.

    resumptions: by outcome. prompt: as it came, or a chat's text.
    """

    id: str
    arrived: float = field(default_factory=time.perf_counter)
    status: int = 500
    first_text: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    resumptions: Counts[str] = field(default_factory=Counts)
    prompt: object = None
    ignored: list[str] = field(default_factory=list)

    def saw_text(self) -> None:
        """Note the time of a stream's first text."""
        if self.first_text is None:
            self.first_text = time.perf_counter() - self.arrived


class RecordRequests:
    """ASGI middleware: `request.state.record` becomes metrics, a log line and headers of the answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics, log_requests: str) -> None:
        self._app = app
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["record"] = record

        async def send_recorded(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = record.id
                if record.ignored:
                    headers["x-ignored-parameters"] = _header_of(record.ignored)
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_recorded)
        finally:
            self._metrics.in_flight.dec()
            self._report(scope, record)

    def _report(self, scope: Scope, record: RequestRecord) -> None:
        seconds = time.perf_counter() - record.arrived
        # Paths that clients make up would each be a time series.
        route = getattr(scope.get("route"), "path", "unmatched")
        self._metrics.requests.labels(route, str(record.status)).inc()
        self._metrics.seconds.labels(route).observe(seconds)
        if record.first_text is not None:
            self._metrics.first_token_seconds.labels(route).observe(record.first_text)
        self._metrics.tokens.labels("prompt").inc(record.prompt_tokens)
        self._metrics.tokens.labels("completion").inc(record.completion_tokens)
        for outcome, count in record.resumptions.items():
            self._metrics.resumptions.labels(outcome).inc(count)
        if self._log_requests != "none" and scope["method"] == "POST":
            counts = f"prompt {record.prompt_tokens}, completion {record.completion_tokens} tokens"
            if record.resumptions:
                counts += "".join(f", {outcome} {count} times" for outcome, count in record.resumptions.items())
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
