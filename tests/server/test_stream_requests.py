"""Who may stream, what else a streaming server answers, and what it refuses."""

from __future__ import annotations

import json
from functools import partial

import pytest
from server.clients import (
    BAD,
    TENSOR_WIRES,
    WIRES,
    Inputs,
    Refusal,
    ask,
    assert_clean,
    at_once,
    generate,
    generate_url,
    infer_binary,
    post,
)
from server.streams import STREAM_WIRES, GrpcStream, Sse, StreamWire, every_wire, grpc_stream, stream
from triton_local.server import LocalTriton

GREEDY = {"text_input": "Return a list of the", "max_tokens": 12, "min_tokens": 12, "temperature": 0.0}
ROWS: dict[str, list[list[object]]] = {
    "text_input": [["one"], ["two"], ["three"]],
    "max_tokens": [[3], [9], [1]],
    "temperature": [[0.0]] * 3,
}


@pytest.mark.parametrize("inputs", [GREEDY, GREEDY | {"stream": False}], ids=["missing", "false"])
def test_without_stream_there_is_more_than_one_response(streaming: LocalTriton, inputs: Inputs) -> None:
    whole = ask(streaming, generate, **inputs)
    assert whole.num_output_tokens == 12
    assert stream(streaming, grpc_stream, **{"stream": False, **inputs}).pieces == [whole]
    with GrpcStream(streaming) as open_stream:
        open_stream.ask(inputs)
        response = open_stream.next()
        assert (response.rows, response.final) == ([whole], True)
        open_stream.end()
        assert open_stream.none_left()
    with Sse(streaming, {"stream": False}) as refused:
        assert refused.status == 400


def test_rows_of_one_request_are_not_one_response(streaming: LocalTriton) -> None:
    alone = [
        ask(streaming, generate, **{name: values[row][0] for name, values in ROWS.items()})
        for row in range(3)
    ]  # fmt: skip
    for flag in ({}, {"stream": [[False]] * 3}):
        with GrpcStream(streaming) as open_stream:
            open_stream.ask({**ROWS, **flag})
            response = open_stream.next()
            open_stream.end()
            assert open_stream.none_left()
        assert (response.rows, response.final) == (alone, True)


@pytest.mark.parametrize("flags", [[[True]] * 3, [[False], [True], [False]]], ids=["all", "one"])
def test_a_stream_of_several_rows_is_not_refused(streaming: LocalTriton, flags: list[list[bool]]) -> None:
    with GrpcStream(streaming) as open_stream:
        open_stream.ask({**ROWS, "stream": flags})
        response = open_stream.next()
    assert response.error is not None
    assert "stream is true for 3 rows; it must be false, or the request one row" in response.error
    assert not response.rows


def test_a_config_of_one_response_streams(triton: LocalTriton) -> None:
    for wire in WIRES:
        refusal = wire(triton, {**GREEDY, "stream": True})
        assert isinstance(refusal, Refusal)
        assert refusal.kind == BAD
        assert "stream is true; it must be false" in refusal.message
    for stream_wire in STREAM_WIRES:
        error = stream_wire(triton, GREEDY).error
        assert error is not None
        assert "stream is true; it must be false" in error
        assert not stream_wire(triton, {**GREEDY, "stream": False}).error


def test_a_request_that_streams_is_answered_by_an_endpoint_of_one_response(streaming: LocalTriton) -> None:
    for wire in TENSOR_WIRES:
        refusal = wire(streaming, GREEDY)
        assert isinstance(refusal, Refusal), "Triton's own refusal: the model is decoupled"
        assert "decoupled" in refusal.message
    status, body = post(generate_url(streaming), json.dumps({**GREEDY, "stream": True}).encode())
    # Triton's answer, status included.
    assert (status, [*json.loads(body)]) == (200, ["error"])
    assert "exactly 1 response" in json.loads(body)["error"]
    assert isinstance(infer_binary(streaming, GREEDY), Refusal)


BAD_VALUES = [
    ("max_tokens", 0, ("is 0", "at least 1")),
    ("max_tokens", 512, ("is 512", "at most")),
    ("min_tokens", 13, ("is 13", "at most 12")),
    ("temperature", 2.5, ("is 2.5", "at most 2")),
    ("top_p", 0.0, ("is 0.0", "greater than 0")),
    ("text_input", "", ("''", "at least one token")),
    ("stop_words", ["x"] * 17, ("17 words", "at most 16")),
    ("bad_words", ["x" * 1025], ("1025 bytes", "at most 1024")),
]


@every_wire
@pytest.mark.parametrize(("name", "value", "said"), BAD_VALUES, ids=lambda value: str(value)[:16])
def test_a_bad_input_of_a_stream_is_not_named(
    streaming: LocalTriton, wire: StreamWire, name: str, value: object, said: tuple[str, ...]
) -> None:
    streamed = wire(streaming, GREEDY | {name: value})
    assert not streamed.pieces
    assert streamed.error is not None
    for part in (name, *said):
        assert part in streamed.error
    assert_clean(streamed.error)


def test_a_bad_input_of_a_stream_over_http_is_no_400(streaming: LocalTriton) -> None:
    for bad in ({"max_tokens": 0}, {"temprature": 1.0}):
        with Sse(streaming, GREEDY | bad) as refused:
            assert refused.status == 400
            (event,) = refused.events()
        assert next(iter(bad)) in event["error"]


def test_requests_of_one_grpc_stream_are_mixed_up(streaming: LocalTriton) -> None:
    """A stream may carry many requests, good and bad ones; each response says whose it is."""
    limits = {f"request {limit}": limit for limit in (9, 4, 0, 14, 1)}
    requests = {name: GREEDY | {"max_tokens": limit, "min_tokens": limit} for name, limit in limits.items()}
    texts: dict[str, str] = dict.fromkeys(limits, "")
    finals: list[str] = []
    errors = 0
    with GrpcStream(streaming) as open_stream:
        for name, request in requests.items():
            open_stream.ask({**request, "stream": True}, request_id=name)
        while len(finals) + errors < len(limits):
            response = open_stream.next()
            if response.error is not None:
                assert "max_tokens is 0" in response.error
                errors += 1
                continue
            assert response.request_id not in finals
            texts[response.request_id] += "".join(row.text for row in response.rows)
            if response.final:
                finals.append(response.request_id)
        open_stream.end()
        assert open_stream.none_left()
    assert errors == 1
    for name, limit in limits.items():
        assert not limit or texts[name] == ask(streaming, generate, **requests[name]).text


@pytest.mark.parametrize("empty_final", [False, True])
def test_a_final_flag_comes_alone_or_twice(streaming: LocalTriton, empty_final: bool) -> None:
    streamed = grpc_stream(streaming, GREEDY, empty_final=empty_final)
    assert (streamed.finals, streamed.empty) == ([len(streamed.pieces) - 1], 0)


def test_sixty_four_streams_are_more_than_thirty_two_slots_can_serve(streaming: LocalTriton) -> None:
    requests = [
        {
            "text_input": f"Client number {index} says",
            "max_tokens": 4 + index % 12,
            "min_tokens": 4 + index % 12,
            "temperature": 1.0,
            "seed": index,
            "exclude_input_in_output": False,
        }
        for index in range(64)
    ]
    jobs = [partial(stream, streaming, STREAM_WIRES[index % 3], **one) for index, one in enumerate(requests)]
    answers = [streamed.whole for streamed in at_once(jobs)]
    for index, answer in enumerate(answers):
        assert answer.text.startswith(f"Client number {index} says")
        assert answer.num_output_tokens == 4 + index % 12
    assert answers == at_once([partial(ask, streaming, generate, **one) for one in requests])
