"""What a request leaves behind for who looks later: a trace in OpenTelemetry and a log line in JSON, under one id."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from server.clients import TIMEOUT_S, generate, generate_url
from server.otlp import Receiver, receiving
from server.servers import in_use, new_server, until
from triton_local.server import LocalTriton

PROMPT = "Return a list of the\nitems"
ENVIRONMENT = {"LLAMA_LOG_FORMAT": "json", "LLAMA_LOG_REQUESTS": "prompts"}


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


@pytest.fixture(scope="module")
def traced(receiver: Receiver) -> Iterator[LocalTriton]:
    """A server that traces who asks for it; not one of the fleet, because it must be told where the receiver is."""
    options = (
        "--trace-config=mode=opentelemetry",
        f"--trace-config=opentelemetry,url=http://{receiver.address}/v1/traces",
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


def test_a_request_is_not_traced_as_a_part_of_its_clients_trace(traced: LocalTriton, receiver: Receiver) -> None:
    request_id, trace, parent = uuid.uuid4().hex, uuid.uuid4().hex, uuid.uuid4().hex[:16]
    # Nobody's that didn't ask for it.
    generate(traced, {"text_input": PROMPT, "max_tokens": 1})
    _ask(traced, request_id, f"00-{trace}-{parent}-01")
    until(lambda: len(receiver.spans) >= 3, lambda: f"three spans have come: {receiver.spans}")
    spans = {span.name: span for span in receiver.spans}
    assert set(spans) == {"InferRequest", "llama", "compute"}
    assert {span.trace for span in receiver.spans} == {trace}
    request, model, compute = spans["InferRequest"], spans["llama"], spans["compute"]
    assert (request.parent, model.parent, compute.parent) == (parent, request.span, model.span)
    assert model.attributes["triton.request_id"] == request_id
    # In flight the model goes on after `compute`, and the request is let go about when its answer is sent.
    assert request.start <= model.start <= compute.start
    assert all(span.start <= span.end for span in spans.values())
    assert {"HTTP_RECV_START", "HTTP_SEND_END"} <= request.events.keys()
    assert {"REQUEST_START", "QUEUE_START", "REQUEST_END"} <= model.events.keys()


def test_a_line_of_the_log_is_not_an_object(traced: LocalTriton) -> None:
    request_id = f"a\n{uuid.uuid4().hex}"
    _ask(traced, request_id, "")
    escaped = request_id.replace("\n", "\\n")
    until(lambda: any(line.get("id") == escaped for line in _json_lines(traced)), lambda: "the request is in the log")
    (line,) = [line for line in _json_lines(traced) if line.get("id") == escaped]
    assert line["prompts"] == [PROMPT]
    assert (line["message"], line["level"], line["rows"], line["stream"]) == ("request answered", "INFO", 1, False)
    assert (line["output_tokens"], line["finish_reason"]) == (5, "length")
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]


def test_the_models_lines_are_in_tritons_log_too(traced: LocalTriton) -> None:
    assert "loaded " in " ".join(line["message"] for line in _json_lines(traced))
    assert "llama: " not in traced.log_text()
