"""A request leaves an OpenTelemetry trace and a log line in JSON under its id.

The exporter of Triton 2.51 (opentelemetry-cpp 1.13) sends OTLP over HTTP as JSON, which the receiver here collects.
"""

from __future__ import annotations

import json
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from server.clients import TIMEOUT_S, generate, generate_url
from server.servers import in_use, new_server, until
from triton_local.server import LocalTriton

PROMPT = "Return a list of the\nitems"
ENVIRONMENT = {"LLAMA_LOG_FORMAT": "json", "LLAMA_LOG_REQUESTS": "prompts"}


Span = dict[str, Any]


class Receiver(ThreadingHTTPServer):
    """Collects the spans of every export, in OTLP's JSON."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Export)
        self.spans: list[Span] = []


class _Export(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scopes = [scope for resource in body["resourceSpans"] for scope in resource["scopeSpans"]]
        self.server.spans += [span for scope in scopes for span in scope["spans"]]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, name="otlp")
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def traced(receiver: Receiver) -> Iterator[LocalTriton]:
    """A server that traces requests with a traceparent; not in the fleet, because it needs the receiver's address."""
    options = (
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url=http://127.0.0.1:{receiver.server_port}/v1/traces",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=0",
    )
    server = new_server(environment=ENVIRONMENT, options=options)
    server.start()
    try:
        with in_use("traced", server):
            yield server
    finally:
        server.stop()


def _ask(server: LocalTriton, request_id: str, traceparent: str) -> None:
    body = {"id": request_id, "text_input": PROMPT, "max_tokens": 5, "min_tokens": 5, "temperature": 0.0}
    request = urllib.request.Request(
        generate_url(server),
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "traceparent": traceparent},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        assert response.status == 200
        response.read()


def _json_lines(server: LocalTriton) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]


def test_a_request_is_traced_as_part_of_its_clients_trace(traced: LocalTriton, receiver: Receiver) -> None:
    request_id, trace, parent = uuid.uuid4().hex, uuid.uuid4().hex, uuid.uuid4().hex[:16]
    # Without a traceparent there is no trace.
    generate(traced, {"text_input": PROMPT, "max_tokens": 1})
    _ask(traced, request_id, f"00-{trace}-{parent}-01")
    until(lambda: len(receiver.spans) >= 3, lambda: f"three spans have come: {receiver.spans}")
    spans = {span["name"]: span for span in receiver.spans}
    assert set(spans) == {"InferRequest", "llama", "compute"}
    assert {span["traceId"] for span in spans.values()} == {trace}
    request, model, compute = spans["InferRequest"], spans["llama"], spans["compute"]
    parents = (request["parentSpanId"], model["parentSpanId"], compute["parentSpanId"])
    assert parents == (parent, request["spanId"], model["spanId"])
    assert {"key": "triton.request_id", "value": {"stringValue": request_id}} in model["attributes"]
    starts = [int(span["startTimeUnixNano"]) for span in (request, model, compute)]
    # In-flight, the model continues after `compute`, and the request ends about when its answer is sent.
    assert starts == sorted(starts)
    assert all(int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"]) for span in spans.values())
    assert {"HTTP_RECV_START", "HTTP_SEND_END"} <= {event["name"] for event in request["events"]}
    assert {"REQUEST_START", "QUEUE_START", "REQUEST_END"} <= {event["name"] for event in model["events"]}


def test_a_request_is_one_json_object_in_the_log(traced: LocalTriton) -> None:
    request_id = f"a\n{uuid.uuid4().hex}"
    _ask(traced, request_id, "")
    escaped = request_id.replace("\n", "\\n")
    until(lambda: any(line.get("id") == escaped for line in _json_lines(traced)), lambda: "the request is in the log")
    (line,) = [line for line in _json_lines(traced) if line.get("id") == escaped]
    assert line["prompts"] == [PROMPT]
    assert (line["message"], line["level"], line["rows"], line["stream"]) == ("request answered", "INFO", 1, False)
    assert (line["output_tokens"], line["finish_reason"]) == (5, "length")
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]


def test_with_json_logging_the_model_writes_nothing_to_tritons_log(traced: LocalTriton) -> None:
    assert "loaded " in " ".join(line["message"] for line in _json_lines(traced))
    assert "llama: " not in traced.log_text()
