"""Spans of a request through the endpoint and a real model, as a collector gets them."""

from __future__ import annotations

import pytest
from collector import Collector
from end_to_end.openai_endpoint import in_front_of
from end_to_end.plans import SOON
from end_to_end.wires import generate
from triton_local.server import LocalTriton

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
SECRET = "The password is swordfish"
STAGES = ("queue", "prefill", "decode")


@pytest.fixture
def came(spans: Collector) -> Collector:
    spans.spans.clear()
    return spans


def test_a_request_is_one_trace_from_its_caller_to_the_last_token(
    streaming: LocalTriton, came: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    body = {"model": "pydoc-llama", "prompt": SECRET, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with in_front_of(streaming, traces=came.url) as endpoint:
        answer = endpoint.http.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT}).json()
    (request,) = came.wait_for("POST /v1/completions")
    stages = [came.wait_for(name)[0] for name in STAGES]
    assert (request.trace, request.parent) == (TRACE, PARENT)
    assert {(span.service, span.trace, span.parent) for span in stages} == {("triton-llama", TRACE, request.id)}
    times = [request.began, *[span.began for span in stages], stages[-1].ended, request.ended]
    assert times == sorted(times)
    assert [span.ended for span in stages[:-1]] == [span.began for span in stages[1:]]
    assert stages[1].attributes["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    decode = stages[-1].attributes
    assert (decode["gen_ai.usage.output_tokens"], decode["gen_ai.response.finish_reasons"]) == (5, ["length"])
    # The first token is the prefill's.
    assert 0 < int(str(decode["llama.steps"])) <= 4
    assert b"swordfish" not in came.bodies
    assert answer["choices"][0]["text"].encode() not in came.bodies


def test_a_client_of_triton_gives_its_span_as_a_parameter(streaming: LocalTriton, came: Collector) -> None:
    generate(streaming, {"text_input": SECRET, "max_tokens": 3, "traceparent": TRACEPARENT})
    for name in STAGES:
        assert [(span.trace, span.parent) for span in came.wait_for(name)] == [(TRACE, PARENT)]
