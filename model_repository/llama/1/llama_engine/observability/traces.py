"""Traces: spans of a request's sequences, children of the span in its `traceparent`, sent to an OTLP collector.

The spans are made when the response has ended, from the times and counts that the sequences have anyway: a step costs
the same with and without them. OpenTelemetry's thread exports them. A queue that is full, or a collector that is down,
drops spans. They have counts and times, and no text.

Imported with the setting `traces` only.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from llama_engine.engine.events import finish_reason
from llama_engine.engine.sequence import Sequence as EngineSequence
from llama_engine.errors import Cancelled, RequestError

CLOSE_SECONDS = 2.0
"""Seconds for sending the last spans."""

_log = logging.getLogger(__name__)
_PROPAGATOR = TraceContextTextMapPropagator()


class Traces:
    """Records the spans of one instance. url: of the collector, without /v1/traces."""

    def __init__(self, url: str) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "triton-llama"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter(url)))
        self._tracer = self._provider.get_tracer("llama_engine")

    def record(self, traceparent: str, sequences: Sequence[EngineSequence]) -> None:
        """Record the stages of sequences: queue, prefill and decode, as far as each came.

        traceparent: W3C's; without a valid one there are no spans.
        """
        parent = _PROPAGATOR.extract({"traceparent": traceparent})
        if not get_current_span(parent).get_span_context().is_valid:
            return
        now, offset = time.monotonic(), time.time_ns() - time.monotonic_ns()
        for index, sequence in enumerate(sequences):
            starts = (sequence.arrived_at, sequence.admitted_at, sequence.first_token_at)
            # Another choice's error ends a response before its other sequences have finished.
            end = now if math.isnan(sequence.finished_at) else sequence.finished_at
            times = [offset + round(seconds * 1e9) for seconds in (*starts, end) if not math.isnan(seconds)]
            stages = list(zip(_attributes(sequence).items(), times, times[1:], strict=False))
            for (name, attributes), began, ended in stages:
                span = self._tracer.start_span(name, parent, start_time=began, attributes=attributes)
                span.set_attribute("llama.sequence_index", index)
                if name == stages[-1][0][0] and sequence.result is not None:
                    span.set_attribute("gen_ai.response.finish_reasons", [finish_reason(sequence.result)])
                    if isinstance(sequence.result, RequestError) and not isinstance(sequence.result, Cancelled):
                        span.set_status(StatusCode.ERROR)
                span.end(ended)

    def close(self) -> None:
        """Send the last spans, within CLOSE_SECONDS."""
        # The processor's own shutdown waits for half a minute if the collector is down.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)


def _attributes(sequence: EngineSequence) -> dict[str, dict[str, int]]:
    """Return the counts of each stage by its name, in order."""
    return {
        "queue": {},
        "prefill": {
            "gen_ai.usage.input_tokens": sequence.num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": sequence.num_cached_prompt_tokens,
        },
        "decode": {
            "gen_ai.usage.output_tokens": sequence.num_output_tokens - len(sequence.request.resume_ids),
            "llama.steps": sequence.num_steps,
            "llama.accepted_draft_tokens": sequence.num_accepted_draft_tokens,
        },
    }


class _Exporter(OTLPSpanExporter):
    """Logs the first problem with the collector, and no other one until an export has succeeded.

    The endpoint's triton_llama_openai/traces.py has the same class: neither may import the other.
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
            _log.warning("traces: %s This is logged once until an export succeeds.", record.getMessage())
        self._logged = True
        return False
