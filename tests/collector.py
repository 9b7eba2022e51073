"""An OpenTelemetry collector for tests: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it came. Ids are hexadecimal; parent is empty for a root span. began, ended: nanoseconds since 1970."""

    service: object
    name: str
    trace: str
    id: str
    parent: str
    began: int
    ended: int
    failed: bool
    attributes: dict[str, object]


@dataclass
class Collector:
    """The spans that came. bodies: all that was sent."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    bodies: bytes = b""

    def wait_for(self, name: str, count: int = 1) -> list[ReceivedSpan]:
        """Return the spans of this name once there are so many of them, in order of their beginning."""
        deadline = time.monotonic() + 60
        while len(found := [span for span in self.spans if span.name == name]) < count:
            assert time.monotonic() < deadline, f"only {[span.name for span in self.spans]} came"
            time.sleep(0.01)
        return sorted(found, key=lambda span: span.began)

    def take(self, body: bytes) -> None:
        """Read a request's body."""
        self.bodies += body
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {entry.key: _value(entry.value) for entry in of_resource.resource.attributes}
            for span in (span for scope in of_resource.scope_spans for span in scope.spans):
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano, span.end_time_unix_nano)
                attributes = {entry.key: _value(entry.value) for entry in span.attributes}
                failed = span.status.code == span.status.STATUS_CODE_ERROR
                self.spans.append(ReceivedSpan(resource["service.name"], span.name, *ids, *times, failed, attributes))


@contextmanager
def collector() -> Iterator[Collector]:
    """Serve on a free port of this machine."""
    came = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            came.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        came.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield came
        server.shutdown()
        thread.join()


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(element) for element in value.array_value.values]
    return None if kind is None else getattr(value, kind)
