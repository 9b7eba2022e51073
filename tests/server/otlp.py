"""A receiver of OpenTelemetry traces: keeps the spans that a server exports over OTLP/HTTP.

Takes JSON only, which is what the exporter in Triton 2.51 sends (opentelemetry-cpp 1.13).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Span:
    """One span; ids in hexadecimal digits, times in nanoseconds since 1970. parent: empty for the first of a trace."""

    name: str
    trace: str
    span: str
    parent: str
    start: int
    end: int
    attributes: dict[str, str | int]
    events: dict[str, int]


class Receiver:
    """What has come so far."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._spans: list[Span] = []

    @property
    def spans(self) -> list[Span]:
        """Every span that has come, in no order."""
        with self._lock:
            return list(self._spans)

    def take(self, body: bytes) -> None:
        """Keep the spans of one export."""
        spans = list(_decode(body))
        with self._lock:
            self._spans += spans


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Listen on this machine for as long as the block lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            receiver.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, name="otlp")
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


def _decode(body: bytes) -> Iterator[Span]:
    for resource in json.loads(body)["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield Span(
                    name=span["name"],
                    trace=span["traceId"],
                    span=span["spanId"],
                    parent=span.get("parentSpanId", ""),
                    start=int(span["startTimeUnixNano"]),
                    end=int(span["endTimeUnixNano"]),
                    attributes={one["key"]: _value(one["value"]) for one in span.get("attributes", ())},
                    events={event["name"]: int(event["timeUnixNano"]) for event in span.get("events", ())},
                )


def _value(value: dict[str, str]) -> str | int:
    # 64 bits are a string in protobuf's JSON.
    return int(value["intValue"]) if "intValue" in value else value["stringValue"]
