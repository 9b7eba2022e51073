"""Every answered request is one line of the log under its client's id, without its prompt."""

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
from triton_local.log import parse_line
from triton_local.server import LocalTriton

SECRET = "the password is swordfish"
REQUEST = {"text_input": SECRET, "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}


@pytest.fixture
def request_id() -> str:
    return uuid.uuid4().hex


def _over_generate(server: LocalTriton, request_id: str) -> None:
    assert not isinstance(generate(server, REQUEST | {"id": request_id}), Refusal)


def _over_infer(server: LocalTriton, request_id: str) -> None:
    inputs = [
        {"name": name, "shape": [1, 1], "datatype": kind, "data": as_rows(value)[0]}
        for (name, value), kind in zip(REQUEST.items(), ("BYTES", "INT32", "INT32", "FP32"), strict=True)
    ]
    assert post(infer_url(server), json.dumps({"id": request_id, "inputs": inputs}).encode())[0] == 200


def _over_grpc(server: LocalTriton, request_id: str, rows: int = 1) -> None:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        tensors = [fill(tritonclient.grpc.InferInput, name, [[value]] * rows) for name, value in REQUEST.items()]
        client.infer("llama", tensors, request_id=request_id)


@pytest.mark.parametrize("send", [_over_generate, _over_infer, _over_grpc])
def test_a_request_is_one_line_with_its_id(
    triton: LocalTriton, request_id: str, send: Callable[[LocalTriton, str], None]
) -> None:
    send(triton, request_id)
    line = line_of(triton, request_id)
    logged = tuple(line[name] for name in ("rows", "stream", "finish_reason", "output_tokens"))
    assert logged == ("1", "false", "length", "3")
    assert int(line["input_tokens"]) > 1
    queued, first, whole = (float(line[name]) for name in ("queue_seconds", "first_token_seconds", "seconds"))
    assert 0 <= queued <= first <= whole


def test_a_stream_is_one_line(streaming: LocalTriton, request_id: str) -> None:
    with GrpcStream(streaming) as stream:
        stream.ask({"stream": True, **REQUEST}, request_id)
        while not stream.next().final:
            pass
    line = line_of(streaming, request_id)
    assert (line["stream"], line["output_tokens"], line["finish_reason"]) == ("true", "3", "length")


def test_a_refused_request_is_logged_with_its_error(triton: LocalTriton, request_id: str) -> None:
    assert isinstance(generate(triton, REQUEST | {"temperature": 9.0, "id": request_id}), Refusal)
    line = line_of(triton, request_id)
    assert (line["rows"], line["finish_reason"], line["output_tokens"]) == ("0", "invalid", "0")
    assert "temperature" in line["error"]


def test_a_request_of_several_rows_is_one_line(triton: LocalTriton, request_id: str) -> None:
    _over_grpc(triton, request_id, rows=2)
    line = line_of(triton, request_id)
    assert (line["rows"], line["output_tokens"]) == ("2", "6")


def test_a_cancelled_request_is_logged(narrow: LocalTriton, metrics: Metrics, request_id: str) -> None:
    # Long, because metrics are a moment late: it still runs when they show it.
    with Call(narrow, REQUEST | {"max_tokens": 480, "min_tokens": 480}, request_id=request_id) as call:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 1, "it runs")
        call.cancel()
        assert line_of(narrow, request_id)["finish_reason"] == "cancelled"


def test_requests_without_an_id_get_different_numbers(triton: LocalTriton) -> None:
    def ids() -> set[str]:
        return {message.split(" ")[3] for message in said(triton)}

    before = ids()
    for _ in range(2):
        ask(triton, grpc, **REQUEST)
    until(lambda: len(ids() - before) == 2, lambda: "two more ids are logged")
    assert all(name.startswith("id=#") for name in ids() - before)


def test_an_id_with_line_breaks_and_escapes_stays_one_short_ascii_line(triton: LocalTriton, request_id: str) -> None:
    forged = f'E1121 10:00:00.000000 1 model.py:1] "llama: forged {request_id}"'
    body = json.dumps(REQUEST | {"id": f'x\n{forged}\r\n\x1b[31m" rows=99 \u2028{"y" * 5000}'}).encode()
    assert post(generate_url(triton), body)[0] == 200
    until(lambda: any(request_id in message for message in said(triton)), lambda: "the request is in the log")
    (line,) = [line for line in triton.log_text().splitlines() if request_id in line]
    assert parse_line(line).message.startswith('llama: request answered id="x')
    assert line.isascii()
    assert len(line) < 1500
    assert " rows=1 " in line


def test_no_prompt_is_in_the_log(either: LocalTriton, request_id: str) -> None:
    """Neither of these requests nor of those that other tests sent before."""
    assert not isinstance(generate(either, REQUEST | {"id": f"{request_id}-1"}), Refusal)
    assert isinstance(generate(either, REQUEST | {"temperature": 9.0, "id": f"{request_id}-2"}), Refusal)
    reasons = [line_of(either, f"{request_id}-{number}")["finish_reason"] for number in (1, 2)]
    assert reasons == ["length", "invalid"]
    assert "swordfish" not in either.log_text()
