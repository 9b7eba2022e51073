"""Traces: a span of each POST and of each of its resumptions, sent to an OTLP collector.

OpenTelemetry's thread exports them. A queue that is full, or a collector that is down, drops spans. They have names,
counts and times, and no text.

Imported with the setting `traces` only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from triton_llama_openai.record import TRACEPARENT, RequestRecord

CLOSE_SECONDS = 2.0
"""Seconds for sending the last spans."""

LOG = logging.getLogger("triton_llama_openai")
_PROPAGATOR = TraceContextTextMapPropagator()
_OPERATIONS = dict.fromkeys(("/v1/chat/completions", "/v1/messages", "/v1/responses"), "chat")
_OPERATIONS |= {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
"""OpenTelemetry's operation of each path that runs the model; rendering and counting tokens are none."""


class Traces:
    """Sends the spans of one endpoint. url: of the collector, without /v1/traces."""

    def __init__(self, url: str) -> None:
        resource = Resource.create({"service.name": "triton-llama-openai"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(url)))
        self.tracer = self._provider.get_tracer("triton_llama_openai")

    def close(self) -> None:
        """Send the last spans, within CLOSE_SECONDS."""
        # The processor's own shutdown waits for half a minute if the collector is down.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


class TraceRequests:
    """ASGI middleware, within `RecordRequests`: a POST's record becomes its span, a child of its `traceparent`."""

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request."""
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        record = scope["state"]["record"]
        # As the record does, the span begins with the request's arrival: `time_to_first_chunk` is within it.
        arrived = time.time_ns() - round((time.perf_counter() - record.arrived) * 1e9)
        parent = _PROPAGATOR.extract(Headers(scope=scope))
        span = self._tracer.start_span("POST", parent, SpanKind.SERVER, start_time=arrived)
        for_children: dict[str, str] = {}
        if span.is_recording():
            _PROPAGATOR.inject(for_children, set_span_in_context(span))
        TRACEPARENT.set(for_children.get("traceparent", ""))
        try:
            await self._app(scope, receive, send)
        finally:
            self._end(span, record, getattr(scope.get("route"), "path", "unmatched"))

    def _end(self, span: Span, record: RequestRecord, route: str) -> None:
        offset = time.time_ns() - time.monotonic_ns()
        for outcome, began, ended in record.interruptions:
            resume = self._tracer.start_span(
                "resume",
                set_span_in_context(span),
                start_time=offset + round(began * 1e9),
                attributes={"llama.outcome": outcome},
            )
            resume.end(offset + round(ended * 1e9))
            if outcome == "given_up":
                span.set_status(StatusCode.ERROR)
        if record.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.update_name(f"POST {route}")
        span.set_attributes(
            {
                "http.request.method": "POST",
                "http.route": route,
                "http.response.status_code": record.status,
                "http.response.header.x-request-id": [record.id],
            }
        )
        if record.model and (operation := _OPERATIONS.get(route)):
            span.set_attributes(
                {
                    "gen_ai.operation.name": operation,
                    "gen_ai.provider.name": "triton-llama",
                    "gen_ai.request.model": record.model,
                    "gen_ai.usage.input_tokens": record.prompt_tokens,
                    "gen_ai.usage.output_tokens": record.completion_tokens,
                    "gen_ai.response.finish_reasons": record.finish_reasons,
                }
            )
        if record.first_token_seconds is not None:
            span.set_attribute("gen_ai.response.time_to_first_chunk", record.first_token_seconds)
        span.end()


class _Exporter(OTLPSpanExporter):
    """Logs the first problem with the collector, and no other one until an export has succeeded.

    The model's llama_engine/observability/traces.py has the same class: neither may import the other.
    """

    def __init__(self, url: str) -> None:
        super().__init__(f"{url.rstrip('/')}/v1/traces")
        self._logged = False
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(self._log_first)
        # Otherwise each span that a full queue drops could be a line.
        logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._logged = False
        return result

    def shutdown(self) -> None:
        """Send no more."""
        super().shutdown()  # type: ignore[no-untyped-call]
        logging.getLogger(OTLPSpanExporter.__module__).removeFilter(self._log_first)

    def _log_first(self, record: logging.LogRecord) -> bool:
        if not self._logged:
            LOG.warning("traces: %s This is logged once until an export succeeds.", record.getMessage())
        self._logged = True
        return False
