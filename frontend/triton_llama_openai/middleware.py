"""Around every request: its record, a log line, headers; bounds on headers, body and requests in flight."""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from triton_llama_openai.errors import ApiError, ClientLeftError, error_response, from_validation, shorten
from triton_llama_openai.metrics import LoraUse, Metrics
from triton_llama_openai.protocol.schema import Schema
from triton_llama_openai.settings import Settings

S = TypeVar("S", bound=Schema)
LOG = logging.getLogger("triton_llama_openai")
MAX_HEADER_BYTES = 32 << 10
"""Maximum bytes of all headers. uvicorn closes a connection that sends twice as many."""

TRACEPARENT = ContextVar("traceparent", default="")
"""The span of the request that a task answers, in W3C's form; empty without one."""

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")
_MAX_NAME, _MAX_NAMES = 64, 1024
"""Characters of one field, and of all fields, in a header."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_ABSOLUTE_FORM = re.compile(r"https?://[^/?]*", re.IGNORECASE)
_ENCODINGS = ("gzip", "deflate")


class Interruption(NamedTuple):
    """A loss of a request's Triton. outcome: resumed or given_up. Times are monotonic."""

    outcome: str
    began: float
    ended: float


@dataclass(eq=False)
class RequestRecord:
    """One request's figures. first_text: seconds from arrival, of a stream. ignored: fields without effect.

    session: the client's name for a conversation. model: its served name, of a request for text. adapter: its name, of
    a request with one. finish_reasons: of its choices that have ended. prompt: as it came, or a chat's text.
    key_digest: of the API key, empty without one.
    """

    id: str
    session: str = field(default="", repr=False)
    arrived: float = field(default_factory=time.perf_counter)
    status: int = 500
    first_text: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str = ""
    adapter: str = ""
    finish_reasons: list[str] = field(default_factory=list)
    interruptions: list[Interruption] = field(default_factory=list)
    prompt: object = None
    ignored: list[str] = field(default_factory=list)
    key_digest: bytes = field(default=b"", repr=False)

    def saw_text(self) -> None:
        """Note the time of a stream's first text."""
        if self.first_text is None:
            self.first_text = time.perf_counter() - self.arrived

    def end_interruption(self, outcome: str, began: float) -> None:
        """Note the end of an interruption. began: its monotonic time."""
        self.interruptions.append(Interruption(outcome, began, time.monotonic()))


def lora_use(loaded: int, records: Collection[RequestRecord]) -> LoraUse:
    """Return which adapters the requests in flight use. loaded: number of adapters."""
    used = [(record.adapter, record.completion_tokens > 0) for record in records if record.adapter]
    waiting, running = (sorted({name for name, runs in used if runs is state}) for state in (False, True))
    return LoraUse(loaded, waiting, running)


class NormalizeTarget:
    """ASGI middleware: routes see an absolute-form target as its path, `/path/` as `/path`, and HEAD as GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request. The server, which has a scope of its own, sends no body to a HEAD."""
        if scope["type"] == "http":
            path = _ABSOLUTE_FORM.sub("", scope["path"], count=1) if scope["path"][:1] != "/" else scope["path"]
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            scope = {**scope, "path": path.rstrip("/") or "/", "method": method}
        await self._app(scope, receive, send)


class RecordRequests:
    """ASGI middleware: `request.state.record` becomes metrics, a log line and headers of the answer.

    records: has those of the requests in flight.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, records: set[RequestRecord], log_requests: str) -> None:
        self._app = app
        self._records = records
        self._metrics = metrics
        self._log_requests = log_requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""
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
                response_headers["x-request-id"] = record.id
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
        if record.first_text is not None:
            self._metrics.first_token_seconds.labels(route).observe(record.first_text)
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
            app = error_response(ApiError(431, message, None, "headers_too_large"))
        await app(scope, receive, send)


async def parse_request(request: Request, schema: type[S], settings: Settings) -> S:
    """Return a request's body. Raises ApiError for the first violation of the schema, ClientLeftError."""
    text = await _read_body(request, settings.max_body_bytes, settings.body_timeout)
    try:
        body = schema.model_validate_json(text, extra="allow" if settings.unknown_fields == "ignore" else "forbid")
    except ValidationError as error:
        raise from_validation(error) from error
    request.state.record.ignored = body.ignored()
    return body


async def _read_body(request: Request, max_bytes: int, seconds: float) -> bytes:
    """Return a request's body, decompressed, without a byte order mark.

    Raises:
        ApiError: it is larger than the bound, announced or not, before or after decompression; it takes longer than
            `seconds` to arrive; or its content encoding is unknown or damaged.
        ClientLeftError: the client has left before its end.
    """
    decompress = _decompressor(request.headers.get("content-encoding", "identity").strip().lower(), max_bytes)
    content_length = request.headers.get("content-length", "")
    if content_length.isdecimal() and int(content_length) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for part in request.stream():
                body += decompress(part)
                if len(body) > max_bytes:
                    raise _too_large(max_bytes)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {seconds:g} s to arrive", None, "timeout") from None
    except ClientDisconnect:
        raise ClientLeftError from None
    return bytes(body).removeprefix(codecs.BOM_UTF8)


def _decompressor(encoding: str, max_bytes: int) -> Callable[[bytes], bytes]:
    """Return a function that decodes the body's next part, b"" for its end, to at most `max_bytes` + 1 bytes.

    Raises:
        ApiError: the encoding is unknown; the function raises it for a body in another encoding, or without its end.
    """
    if encoding == "identity":
        return lambda part: part
    if encoding not in _ENCODINGS:
        bound = f"it must be one of {', '.join(_ENCODINGS)}"
        raise ApiError(
            415, f"the body's Content-Encoding is {shorten(encoding)}; {bound}", None, "unsupported_encoding"
        )
    decoder = None

    def decompress(part: bytes) -> bytes:
        nonlocal decoder
        if decoder is None:
            # HTTP's deflate has zlib's header, whose first byte ends in 8; some clients leave it out.
            raw = encoding == "deflate" and part[:1] != b"" and part[0] & 15 != 8
            decoder = zlib.decompressobj(-zlib.MAX_WBITS if raw else zlib.MAX_WBITS | 32)
        try:
            # Without a bound, a body of 4 MiB could unpack to 4 GiB.
            decoded = decoder.decompress(part, max_bytes + 1)
        except zlib.error as error:
            raise _damaged(encoding) from error
        if decoder.unused_data or (not part and not decoder.eof):
            raise _damaged(encoding)
        return decoded

    return decompress


def _damaged(encoding: str) -> ApiError:
    return ApiError(400, f"the body isn't {encoding}, as its Content-Encoding says", None, "invalid_encoding")


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is too large; it must be at most {max_bytes} bytes", None, "body_too_large")


def limited_route(max_requests: int) -> type[APIRoute]:
    """Return a class of routes that together run `max_requests` requests; one more is refused with 503.

    A request counts from before its body to the end of its answer.
    """
    running = 0

    class LimitedRoute(APIRoute):
        async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal running
            if running >= max_requests:
                raise ApiError(503, f"{max_requests} requests are in flight; try again later", None, "overloaded", 1)
            running += 1
            try:
                await super().handle(scope, receive, send)
            finally:
                running -= 1

    return LimitedRoute
