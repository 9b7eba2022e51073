"""A request leaves one line in the log under its client's id, in text or JSON, and an OpenTelemetry trace.

The exporter of Triton 2.51 (opentelemetry-cpp 1.13) sends OTLP over HTTP as JSON, which the receiver here collects.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from server.clients import Refusal, generate, grpc, infer, model_url, unary_grpc
from server.metrics import line_of
from server.servers import HTTP, in_use, new_server, until
from server.streams import GrpcStream
from triton_local.server import LocalTriton

PROMPT = "Return a list of the\nitems"
SECRET = "the password is swordfish"
REQUEST = {"text_input": SECRET, "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}
TWO_ROWS = {name: [[value]] * 2 for name, value in REQUEST.items()}
ENVIRONMENT = {"LLAMA_LOG_FORMAT": "json", "LLAMA_LOG_REQUESTS": "prompts"}


class _Export(BaseHTTPRequestHandler):
    spans: list[dict[str, Any]]
    """Of every export, in OTLP's JSON."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        scopes = [scope for resource in body["resourceSpans"] for scope in resource["scopeSpans"]]
        self.spans += [span for scope in scopes for span in scope["spans"]]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def traced(ending: ExitStack) -> Iterator[LocalTriton]:
    """A server that traces requests with a traceparent; not a plan, because it needs the receiver's address."""
    _Export.spans = []
    receiver = ending.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), _Export))
    threading.Thread(target=receiver.serve_forever, name="otlp").start()
    ending.callback(receiver.shutdown)
    options = (
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url=http://127.0.0.1:{receiver.server_port}/v1/traces",
        "--trace-config=opentelemetry,bsp_schedule_delay=100",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=0",
    )
    server = ending.enter_context(new_server(environment=ENVIRONMENT, options=options))
    with in_use("traced", server):
        yield server
    server.terminate()


def _ask(server: LocalTriton, request_id: str, traceparent: str) -> None:
    body = {"id": request_id, "text_input": PROMPT, "max_tokens": 5, "min_tokens": 5, "temperature": 0.0}
    HTTP.post(model_url(server, "generate"), json=body, headers={"traceparent": traceparent}).raise_for_status()


def _json_lines(server: LocalTriton) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]


def test_a_request_is_traced_as_part_of_its_clients_trace(traced: LocalTriton) -> None:
    request_id, trace, parent = uuid.uuid4().hex, uuid.uuid4().hex, uuid.uuid4().hex[:16]
    # Without a traceparent there is no trace.
    generate(traced, {"text_input": PROMPT, "max_tokens": 1})
    _ask(traced, request_id, f"00-{trace}-{parent}-01")
    until(lambda: len(_Export.spans) >= 3, lambda: f"three spans have come: {_Export.spans}")
    spans = {span["name"]: span for span in _Export.spans}
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


def test_with_json_logging_a_request_is_one_object(traced: LocalTriton) -> None:
    request_id = f"a\n{uuid.uuid4().hex}"
    _ask(traced, request_id, "")
    escaped = request_id.replace("\n", "\\n")
    until(lambda: any(line.get("id") == escaped for line in _json_lines(traced)), lambda: "the request is in the log")
    (line,) = [line for line in _json_lines(traced) if line.get("id") == escaped]
    assert line["prompts"] == [PROMPT]
    assert (line["message"], line["level"], line["rows"], line["stream"]) == ("request answered", "INFO", 1, False)
    assert (line["output_tokens"], line["finish_reason"]) == (5, "length")
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    assert "loaded " in " ".join(line["message"] for line in _json_lines(traced))
    assert "llama: " not in traced.log_text()


def _ask_stream(server: LocalTriton, request_id: str) -> None:
    with GrpcStream(server) as stream:
        stream.ask({"stream": True, **REQUEST}, request_id)
        while not stream.next().final:
            pass


@pytest.mark.parametrize(
    ("server", "send", "rows", "stream"),
    [
        ("triton", lambda server, request_id: generate(server, REQUEST | {"id": request_id}), 1, "false"),
        ("triton", lambda server, request_id: infer(server, REQUEST, request_id=request_id), 1, "false"),
        ("triton", lambda server, request_id: grpc(server, TWO_ROWS, request_id), 2, "false"),
        ("streaming", lambda server, request_id: unary_grpc(server, REQUEST, request_id), 1, "false"),
        ("streaming", _ask_stream, 1, "true"),
    ],
    indirect=["server"],
    ids=["generate", "infer", "two rows over gRPC", "llama_unary", "stream"],
)
def test_a_request_is_one_line_with_its_id_without_its_prompt(
    server: LocalTriton, send: Callable[[LocalTriton, str], object], rows: int, stream: str
) -> None:
    """Neither that of this request nor of those that other tests sent before."""
    request_id = uuid.uuid4().hex
    send(server, request_id)
    line = line_of(server, request_id)
    logged = tuple(line[name] for name in ("rows", "stream", "finish_reason", "output_tokens"))
    assert logged == (str(rows), stream, "length", str(3 * rows))
    assert int(line["input_tokens"]) > 1
    queued, first, whole = (float(line[name]) for name in ("queue_seconds", "first_token_seconds", "seconds"))
    assert 0 <= queued <= first <= whole
    assert isinstance(generate(server, REQUEST | {"temperature": 9.0, "id": f"{request_id}-2"}), Refusal)
    assert line_of(server, f"{request_id}-2")["finish_reason"] == "invalid"
    assert "swordfish" not in server.log_text()
