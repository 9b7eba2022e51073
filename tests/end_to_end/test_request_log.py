"""A request leaves one line in the log under its client's id, in text or JSON."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pytest
from end_to_end.metrics import line_of
from end_to_end.servers import HTTP, until
from end_to_end.streams import GrpcStream
from end_to_end.wires import Refusal, generate, model_url, unary_grpc
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


def test_a_request_is_one_line_with_its_id_without_its_prompt(streaming: LocalTriton) -> None:
    """Neither that of this request nor of those that other tests sent before."""
    request_id = uuid.uuid4().hex
    with GrpcStream(streaming) as stream:
        stream.ask({"stream": True, **REQUEST}, request_id)
        while not stream.next().final:
            pass
    line = line_of(streaming, request_id)
    logged = [line[name] for name in ("sequences", "stream", "finish_reason", "output_tokens")]
    assert logged == ["1", "true", "length", "3"]
    assert int(line["input_tokens"]) > 1
    queued, first, whole = (float(line[name]) for name in ("queue_seconds", "first_token_seconds", "seconds"))
    assert 0 <= queued <= first <= whole
    assert "swordfish" not in streaming.log_text()


def test_rows_of_a_forwarded_request_share_a_line(streaming: LocalTriton) -> None:
    request_id = uuid.uuid4().hex
    unary_grpc(streaming, TWO_ROWS, request_id)
    line = line_of(streaming, request_id)
    assert [line[name] for name in ("sequences", "stream", "output_tokens")] == ["2", "false", "6"]


def test_a_refusal_is_a_line_without_the_prompt(triton: LocalTriton) -> None:
    request_id = uuid.uuid4().hex
    assert isinstance(generate(triton, REQUEST | {"temperature": 9.0, "id": request_id}), Refusal)
    assert line_of(triton, request_id)["finish_reason"] == "invalid"
    assert "swordfish" not in triton.log_text()
