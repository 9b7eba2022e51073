"""A request leaves one line in the log under its client's id, in text or JSON, and spans for a collector."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from collector import Collector
from end_to_end.metrics import line_of
from end_to_end.plans import SOON
from end_to_end.servers import HTTP, in_front_of, until
from end_to_end.streams import sse
from end_to_end.wires import model_url, unary_grpc
from triton_local.server import LocalTriton

PROMPT = "Return a list of the\nitems"
SECRET = "the password is swordfish"
REQUEST = {"text_input": SECRET, "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}
TWO_ROWS = {name: [[value]] * 2 for name, value in REQUEST.items()}


def _json_lines(server: LocalTriton) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.log_text().splitlines() if line.startswith("{")]


@pytest.mark.long
def test_with_json_logging_a_request_is_one_object(batched_int8: LocalTriton) -> None:
    request_id = f"a\n{uuid.uuid4().hex}"
    body = {"id": request_id, "text_input": PROMPT, "max_tokens": 5, "min_tokens": 5, "temperature": 0.0}
    HTTP.post(model_url(batched_int8, "generate"), json=body).raise_for_status()
    escaped = request_id.replace("\n", "\\n")

    def own() -> list[dict[str, Any]]:
        return [line for line in _json_lines(batched_int8) if line.get("id") == escaped]

    until(lambda: bool(own()), lambda: "the request is in the log")
    (line,) = own()
    assert line["prompts"] == [PROMPT]
    assert (line["message"], line["level"], line["sequences"], line["stream"]) == ("request answered", "INFO", 1, False)
    assert (line["output_tokens"], line["finish_reason"]) == (5, "length")
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["seconds"]
    assert "loaded " in " ".join(line["message"] for line in _json_lines(batched_int8))
    assert "llama: " not in batched_int8.log_text()


def test_rows_of_a_request_share_a_line_with_its_id_without_their_prompts(streaming: LocalTriton) -> None:
    """Neither the prompts of this request, which is forwarded, nor those that other tests sent before."""
    request_id = uuid.uuid4().hex
    unary_grpc(streaming, TWO_ROWS, request_id)
    line = line_of(streaming, request_id)
    logged = [line[name] for name in ("sequences", "stream", "finish_reason", "output_tokens")]
    assert logged == ["2", "false", "length", "6"]
    assert "swordfish" not in streaming.log_text()


@pytest.mark.parametrize(("temperature", "logged"), [(0.0, ["true", "length"]), (9.0, ["false", "invalid"])])
def test_a_stream_and_its_refusal_are_a_line_each(
    streaming: LocalTriton, temperature: float, logged: list[str]
) -> None:
    request_id = uuid.uuid4().hex
    sse(streaming, REQUEST | {"temperature": temperature, "id": request_id})
    line = line_of(streaming, request_id)
    assert [line["stream"], line["finish_reason"]] == logged


TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
STAGES = ("queue", "prefill", "decode")


def test_a_request_is_one_trace_from_its_caller_to_the_last_token(
    streaming: LocalTriton, spans: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SOON.items():
        monkeypatch.setenv(name, value)
    body = {"model": "pydoc-llama", "prompt": SECRET, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    with in_front_of(streaming, traces=spans.url) as endpoint:
        answer = endpoint.http.post("/v1/completions", json=body, headers={"traceparent": TRACEPARENT}).json()
    (request,) = spans.wait_for("POST /v1/completions")
    stages = [spans.wait_for(name)[0] for name in STAGES]
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
    assert b"swordfish" not in spans.bodies
    assert answer["choices"][0]["text"].encode() not in spans.bodies
