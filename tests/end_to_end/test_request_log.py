"""A request leaves one line in the log under its client's id, in text or JSON."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from end_to_end.metrics import line_of
from end_to_end.servers import HTTP, until
from end_to_end.streams import GrpcStream
from end_to_end.wires import Refusal, generate, grpc, infer, model_url, unary_grpc
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


def _ask_stream(server: LocalTriton, request_id: str) -> None:
    with GrpcStream(server) as stream:
        stream.ask({"stream": True, **REQUEST}, request_id)
        while not stream.next().final:
            pass


@pytest.mark.parametrize(
    ("server", "send", "sequences", "stream"),
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
    server: LocalTriton, send: Callable[[LocalTriton, str], object], sequences: int, stream: str
) -> None:
    """Neither that of this request nor of those that other tests sent before."""
    request_id = uuid.uuid4().hex
    send(server, request_id)
    line = line_of(server, request_id)
    logged = tuple(line[name] for name in ("sequences", "stream", "finish_reason", "output_tokens"))
    assert logged == (str(sequences), stream, "length", str(3 * sequences))
    assert int(line["input_tokens"]) > 1
    queued, first, whole = (float(line[name]) for name in ("queue_seconds", "first_token_seconds", "seconds"))
    assert 0 <= queued <= first <= whole
    assert isinstance(generate(server, REQUEST | {"temperature": 9.0, "id": f"{request_id}-2"}), Refusal)
    assert line_of(server, f"{request_id}-2")["finish_reason"] == "invalid"
    assert "swordfish" not in server.log_text()
