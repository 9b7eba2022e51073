"""A request that was answered is one line of the log under its client's id, however it came; and never its prompt."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest
import tritonclient.grpc
from server.clients import Refusal, as_rows, ask, fill, generate, generate_url, grpc, infer_url, post
from server.metrics import Metrics, line_of, said
from server.servers import until
from server.streams import Call, GrpcStream
from triton_local.log_lines import parse_line
from triton_local.server import LocalTriton

SECRET = "the password is swordfish"
REQUEST = {"text_input": SECRET, "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}
TIMES = ("queue_seconds", "first_token_seconds", "seconds")


def _over_generate(server: LocalTriton, request_id: str) -> None:
    assert not isinstance(generate(server, REQUEST | {"id": request_id}), Refusal)


def _over_infer(server: LocalTriton, request_id: str) -> None:
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": kind, "data": as_rows(value)[0]}
        for (name, value), kind in zip(REQUEST.items(), ("BYTES", "INT32", "INT32", "FP32"), strict=True)
    ]
    status, _ = post(infer_url(server), json.dumps({"id": request_id, "inputs": inputs}).encode())
    assert status == 200


def _over_grpc(server: LocalTriton, request_id: str) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        tensors = [fill(tritonclient.grpc.InferInput, name, value) for name, value in REQUEST.items()]
        client.infer("llama", tensors, request_id=request_id)


@pytest.mark.parametrize("send", [_over_generate, _over_infer, _over_grpc])
def test_a_request_is_not_one_line_with_its_id(triton: LocalTriton, send: Callable[[LocalTriton, str], None]) -> None:
    request_id = uuid.uuid4().hex
    send(triton, request_id)
    line = line_of(triton, request_id)
    assert {name: line[name] for name in ("rows", "stream", "finish_reason", "output_tokens")} == {
        "rows": "1",
        "stream": "false",
        "finish_reason": "length",
        "output_tokens": "3",
    }
    assert int(line["input_tokens"]) > 1
    queued, first, whole = (float(line[name]) for name in TIMES)
    assert 0 <= queued <= first <= whole


def test_a_stream_is_a_line_for_each_piece(streaming: LocalTriton) -> None:
    request_id = uuid.uuid4().hex
    with GrpcStream(streaming) as stream:
        stream.ask({"stream": True, **REQUEST}, request_id)
        while not stream.next().final:
            pass
    line = line_of(streaming, request_id)
    assert (line["stream"], line["output_tokens"], line["finish_reason"]) == ("true", "3", "length")


def test_a_refused_request_or_one_of_several_rows_is_noted_wrong(triton: LocalTriton) -> None:
    refused = uuid.uuid4().hex
    assert isinstance(generate(triton, REQUEST | {"temperature": 9.0, "id": refused}), Refusal)
    line = line_of(triton, refused)
    assert (line["rows"], line["finish_reason"], line["output_tokens"]) == ("0", "invalid", "0")
    assert "temperature" in line["error"]
    several = uuid.uuid4().hex
    with tritonclient.grpc.InferenceServerClient(triton.grpc_url) as client:
        rows = {name: [[value], [value]] for name, value in REQUEST.items()}
        client.infer("llama", [fill(tritonclient.grpc.InferInput, *one) for one in rows.items()], request_id=several)
    assert (line_of(triton, several)["rows"], line_of(triton, several)["output_tokens"]) == ("2", "6")


def test_a_cancelled_request_is_not_noted(narrow: LocalTriton) -> None:
    request_id = uuid.uuid4().hex
    metrics = Metrics(narrow)
    # Slow, so that it still runs when metrics that are a moment old say that it does.
    with Call(narrow, REQUEST | {"max_tokens": 480, "min_tokens": 480}, request_id=request_id) as call:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 1, "it runs")
        call.cancel()
        assert line_of(narrow, request_id)["finish_reason"] == "cancelled"


def test_who_gives_no_id_cannot_be_told_from_others(triton: LocalTriton) -> None:
    before = {message.split(" ")[3] for message in said(triton)}
    for _ in range(2):
        ask(triton, grpc, **REQUEST)
    until(lambda: len({message.split(" ")[3] for message in said(triton)} - before) == 2, lambda: "two more ids")
    assert all(name.startswith("id=#") for name in {message.split(" ")[3] for message in said(triton)} - before)


def test_an_id_makes_lines_of_its_own_in_the_log(triton: LocalTriton) -> None:
    mark = uuid.uuid4().hex
    forged = f'E1121 10:00:00.000000 1 model.py:1] "llama: forged {mark}"'
    body = json.dumps(REQUEST | {"id": f'x\n{forged}\r\n\x1b[31m" rows=99 \u2028{"y" * 5000}'}).encode()
    status, _ = post(generate_url(triton), body)
    assert status == 200
    until(lambda: any(mark in message for message in said(triton)), lambda: "the request is in the log")
    (line,) = [line for line in triton.log_text().splitlines() if mark in line]
    assert parse_line(line).message.startswith('llama: request answered id="x')
    assert line.isascii()
    assert len(line) < 1500
    assert " rows=1 " in line


def test_a_prompt_gets_into_the_log(triton: LocalTriton, streaming: LocalTriton) -> None:
    """Of no request, those that other tests have sent before included."""
    for server in (triton, streaming):
        answered, refused = uuid.uuid4().hex, uuid.uuid4().hex
        assert not isinstance(generate(server, REQUEST | {"id": answered}), Refusal)
        assert isinstance(generate(server, REQUEST | {"temperature": 9.0, "id": refused}), Refusal)
        reasons = [line_of(server, request_id)["finish_reason"] for request_id in (answered, refused)]
        assert reasons == ["length", "invalid"]
        assert "swordfish" not in server.log_text()
