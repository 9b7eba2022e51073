"""Spans of the endpoint's requests, as a collector gets them."""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Iterator

import pytest
from collector import Collector, collector
from frontend.endpoints import QUESTION, Endpoint, endpoint
from frontend.fake_triton import FakeTriton, unchanged
from triton_llama_openai.app import create_app
from triton_llama_openai.served.models import Models
from triton_llama_openai.settings import InvalidSettingsError, Settings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def module_collector() -> Iterator[Collector]:
    with collector() as came:
        yield came


@pytest.fixture(scope="module")
def traced_endpoint(shared_triton: FakeTriton, module_collector: Collector) -> Iterator[Endpoint]:
    with pytest.MonkeyPatch.context() as patch:
        # Milliseconds until the spans are sent.
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        with endpoint(shared_triton.port, traces=module_collector.url, resume_timeout=20) as served:
            yield served


@pytest.fixture
def came(module_collector: Collector) -> Collector:
    module_collector.spans.clear()
    return module_collector


@pytest.fixture
def traced(triton: FakeTriton, came: Collector, traced_endpoint: Endpoint) -> Endpoint:
    traced_endpoint.http.headers.pop("traceparent", None)
    return traced_endpoint


def test_a_request_is_a_child_of_its_traceparent(traced: Endpoint, triton: FakeTriton, came: Collector) -> None:
    traced.http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-01"
    answer = traced.chat(stream=True)
    (span,) = came.wait_for("POST /v1/chat/completions")
    assert (span.service, span.trace, span.parent, span.failed) == ("triton-llama-openai", TRACE, PARENT, False)
    assert 0 < span.attributes.pop("gen_ai.response.time_to_first_chunk") < (span.ended - span.began) / 1e9  # type: ignore[operator]
    assert span.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.response.header.x-request-id": [answer.headers["x-request-id"]],
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "triton-llama",
        "gen_ai.request.model": "pydoc-llama",
        "gen_ai.usage.input_tokens": triton.last.prompt_tokens,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["stop"],
    }


def test_the_model_gets_the_span_as_its_parent(traced: Endpoint, triton: FakeTriton, came: Collector) -> None:
    assert traced.complete(prompt=["a b", "c"]).status_code == 200
    (span,) = came.wait_for("POST /v1/completions")
    assert [request.traceparent[:-2] for request in triton.requests] == [f"00-{span.trace}-{span.id}-"] * 2


def test_a_get_and_an_unsampled_caller_get_no_span(traced: Endpoint, triton: FakeTriton, came: Collector) -> None:
    traced.http.get("/v1/models")
    traced.http.headers["traceparent"] = f"00-{TRACE}-{PARENT}-00"
    traced.complete()
    del traced.http.headers["traceparent"]
    traced.complete()
    came.wait_for("POST /v1/completions")
    assert len(came.spans) == 1
    assert triton.requests[0].traceparent == ""


def test_refused_requests_and_those_that_prepare_a_prompt_are_no_operations(traced: Endpoint, came: Collector) -> None:
    assert traced.post("/v1/messages/count_tokens", messages=QUESTION).status_code == 200
    traced.complete(temperature=9)
    (counting,), (span,) = came.wait_for("POST /v1/messages/count_tokens"), came.wait_for("POST /v1/completions")
    assert (span.attributes["http.response.status_code"], span.failed) == (400, False)
    assert not [name for name in (*span.attributes, *counting.attributes) if name.startswith("gen_ai.")]


def test_a_resumption_is_a_span_up_to_the_next_token(traced: Endpoint, triton: FakeTriton, came: Collector) -> None:
    triton.die_after, triton.restart = 2, unchanged
    assert traced.complete().status_code == 200
    (span,), (resume,) = came.wait_for("POST /v1/completions"), came.wait_for("resume")
    assert (resume.trace, resume.parent) == (span.trace, span.id)
    assert span.began < resume.began < resume.ended < span.ended
    assert resume.attributes["llama.outcome"] == "resumed"
    assert len({request.traceparent for request in triton.requests}) == 1


def test_a_collector_that_is_down_is_logged_once(
    triton: FakeTriton, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with caplog.at_level(logging.WARNING), endpoint(triton.port, traces=f"http://127.0.0.1:{port}") as served:
        for _ in range(3):
            assert served.complete().status_code == 200
            time.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 20
    (line,) = [record.message for record in caplog.records if record.name == "triton_llama_openai"]
    assert line.startswith("traces: ")
    assert line.endswith("This is logged once until an export succeeds.")


def test_without_its_packages_the_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton_llama_openai.traces", None)
    settings = Settings(traces="http://127.0.0.1:4318")
    with pytest.raises(InvalidSettingsError, match=r"^traces needs .* pip install 'triton-llama\[tracing\]'$"):
        create_app(settings, Models.of_settings(settings))
