"""Streams: the chunks, joined, are the text of one response, and requests of a stream don't mix."""

from __future__ import annotations

import pytest
from end_to_end.streams import STREAM_WIRES, GrpcStream, StreamWire, events, sse_response
from end_to_end.wires import Inputs, ask, generate
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
GREEDY = {"text_input": PROMPT, "max_tokens": 24, "temperature": 0.0, "repetition_penalty": 1.2}
HOT = {"text_input": PROMPT, "max_tokens": 60, "min_tokens": 60, "temperature": 2.0, "top_p": 1.0, "top_k": 0}
TWELVE = {"text_input": PROMPT, "max_tokens": 12, "min_tokens": 12, "temperature": 0.0}
ROWS: dict[str, list[list[object]]] = {
    "text_input": [["one"], ["two"], ["three"]],
    "max_tokens": [[3], [9], [1]],
    "temperature": [[0.0]] * 3,
}

every_wire = pytest.mark.parametrize("wire", STREAM_WIRES, ids=lambda wire: wire.__name__)


@every_wire
@pytest.mark.parametrize(
    "inputs",
    [
        GREEDY | {"stop_words": ["\n", "the argument"]},
        HOT | {"text_input": "Wäre 🐍 in", "seed": 2**64 - 1, "exclude_input_in_output": False},
        GREEDY | {"max_tokens": 1},
    ],
    ids=["with stop strings", "with its prompt", "one token"],
)
def test_the_chunks_of_a_stream_are_the_text_of_one_response(
    narrow_streaming: LocalTriton, wire: StreamWire, inputs: Inputs
) -> None:
    """The slow model: the tokens of a quick one could all come in one chunk on a busy machine."""
    streamed = wire(narrow_streaming, inputs)
    assert streamed.whole == ask(narrow_streaming, generate, **inputs)
    *before, last = streamed.chunks
    assert bool(before) == (inputs["max_tokens"] != 1)
    assert all(chunk.text for chunk in before), "only the last chunk may be empty"
    assert {(chunk.finish_reason, chunk.num_input_tokens) for chunk in before} <= {("", last.num_input_tokens)}
    assert all(chunk.num_output_tokens >= 1 for chunk in streamed.chunks)


def test_without_stream_there_is_one_final_response(streaming: LocalTriton) -> None:
    rows = [ask(streaming, generate, **{name: values[row][0] for name, values in ROWS.items()}) for row in range(3)]
    with GrpcStream(streaming) as stream:
        stream.ask(ROWS)
        response = stream.next()
        stream.end()
    assert (response.rows, response.final) == (rows, True)


def test_a_stream_of_several_rows_is_refused(streaming: LocalTriton) -> None:
    with GrpcStream(streaming) as stream:
        stream.ask({**ROWS, "stream": [[False], [True], [False]]})
        response = stream.next()
    assert "stream is true in a batch of 3; it must be false, or the batch size 1" in str(response.error)
    assert not response.rows


def test_a_bad_request_to_generate_stream_has_status_400(streaming: LocalTriton) -> None:
    with sse_response(streaming, TWELVE | {"max_tokens": 0}) as refused:
        assert refused.status_code == 400
        (event,) = events(refused)
    assert "max_tokens is 0" in event["error"]
