"""Streams: the chunks, joined, are the text of one response, and requests of a stream don't mix."""

from __future__ import annotations

import json
import random
from functools import partial

import pytest
from engine.prompts import reference_text
from server.clients import (
    TENSOR_WIRES,
    Inputs,
    Refusal,
    ask,
    assert_clean,
    at_once,
    generate,
    generate_url,
    infer_binary,
    post,
)  # fmt: skip
from server.streams import STREAM_WIRES, GrpcStream, Sse, StreamWire, both, every_wire, grpc_stream, stream
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
SNAKE, BROKEN = "🐍", "\N{REPLACEMENT CHARACTER}"
PARTS = HOT | {"text_input": "Return", "max_tokens": 30, "min_tokens": 30}


@every_wire
@pytest.mark.parametrize(
    ("inputs", "most"),
    [(GREEDY, 24), (HOT | {"seed": 1}, 60), (HOT | {"seed": 2**64 - 1}, 60), (GREEDY | {"max_tokens": 1}, 1)],
    ids=["greedy", "seed 1", "largest seed", "one token"],
)
def test_the_chunks_of_a_stream_are_the_text_of_one_response(
    streaming: LocalTriton, wire: StreamWire, inputs: Inputs, most: int
) -> None:
    whole, streamed = both(streaming, wire, **inputs)
    assert whole.num_output_tokens <= most
    assert (len(streamed.chunks) > 1) == (most > 1)


@every_wire
def test_the_first_chunk_begins_with_a_prompt_that_is_not_excluded(streaming: LocalTriton, wire: StreamWire) -> None:
    inputs = HOT | {"text_input": "Wäre 🐍 in", "seed": 3}
    whole, streamed = both(streaming, wire, **inputs, exclude_input_in_output=False)
    assert streamed.chunks[0].text.startswith("Wäre 🐍 in")
    assert whole.text == "Wäre 🐍 in" + stream(streaming, wire, **inputs).whole.text


def test_no_part_of_a_stop_string_is_sent(streaming: LocalTriton) -> None:
    """Stop strings out of a known completion, from every place of it, of one to seven characters."""
    known = ask(streaming, generate, **GREEDY).text
    words = [known[place : place + 1 + place % 7] for place in range(len(known) - 1)]
    # A second one with the same beginning, which never follows, holds text back and has to release it.
    jobs = [
        partial(both, streaming, STREAM_WIRES[index % 3], **GREEDY, stop_words=[word, word[:1] + "\N{SNOWMAN}"])
        for index, word in enumerate(words)
    ]
    results = [result for start in range(0, len(jobs), 24) for result in at_once(jobs[start : start + 24])]
    for (whole, streamed), word in zip(results, words, strict=True):
        assert (whole.text, whole.finish_reason) == (known[: known.index(word)], "stop")
        assert word not in streamed.whole.text


def test_random_streams_equal_their_responses(streaming: LocalTriton) -> None:
    draw = random.Random(43)
    text = reference_text()

    def request(seed: int) -> dict[str, object]:
        start = draw.randrange(len(text) - 200)
        return {
            "text_input": text[start : start + draw.randrange(1, 200)],
            "max_tokens": draw.randrange(1, 30),
            "temperature": draw.choice([0.0, 0.7, 1.0, 2.0]),
            "top_p": draw.choice([0.9, 1.0]),
            "top_k": draw.choice([0, 20]),
            "repetition_penalty": draw.choice([0.8, 1.0, 1.3]),
            "seed": seed,
            "stop_words": draw.choice([[""], ["e"], ["\n", "the", ". "], [" of the ", "in", "x" * 40]]),
            "exclude_input_in_output": draw.random() < 0.7,
        }

    jobs = [partial(both, streaming, STREAM_WIRES[seed % 3], **request(seed)) for seed in range(48)]
    for start in (0, 24):
        at_once(jobs[start : start + 24])


@pytest.mark.parametrize("flag", [{}, {"stream": False}], ids=["missing", "false"])
def test_without_stream_there_is_one_final_response(streaming: LocalTriton, flag: Inputs) -> None:
    whole = ask(streaming, generate, **TWELVE, **flag)
    assert whole.num_output_tokens == 12
    assert stream(streaming, grpc_stream, **TWELVE, stream=False).chunks == [whole]
    rows = [ask(streaming, generate, **{name: values[row][0] for name, values in ROWS.items()}) for row in range(3)]
    several = {name: [[value]] * 3 for name, value in flag.items()}
    for inputs, expected in (({**TWELVE, **flag}, [whole]), ({**ROWS, **several}, rows)):
        with GrpcStream(streaming) as open_stream:
            open_stream.ask(inputs)
            response = open_stream.next()
            open_stream.end()
            assert open_stream.none_left()
        assert (response.rows, response.final) == (expected, True)


@pytest.mark.parametrize("flags", [[[True]] * 3, [[False], [True], [False]]], ids=["all", "one"])
def test_a_stream_of_several_rows_is_refused(streaming: LocalTriton, flags: list[list[bool]]) -> None:
    with GrpcStream(streaming) as open_stream:
        open_stream.ask({**ROWS, "stream": flags})
        response = open_stream.next()
    assert "stream is true for 3 rows; it must be false, or the request one row" in str(response.error)
    assert not response.rows


def test_endpoints_of_one_response_refuse_to_stream(streaming: LocalTriton) -> None:
    """The refusals and their status are Triton's own."""
    for wire in (*TENSOR_WIRES, infer_binary):
        refusal = wire(streaming, TWELVE)
        assert isinstance(refusal, Refusal)
        assert "decoupled" in refusal.message
    status, body = post(generate_url(streaming), json.dumps({**TWELVE, "stream": True}).encode())
    assert (status, [*json.loads(body)]) == (200, ["error"])
    assert "exactly 1 response" in json.loads(body)["error"]


@every_wire
@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("max_tokens", 0, ("is 0", "at least 1")),
        ("max_tokens", 512, ("is 512", "at most")),
        ("min_tokens", 13, ("is 13", "at most 12")),
        ("temperature", 2.5, ("is 2.5", "at most 2")),
        ("top_p", 0.0, ("is 0.0", "greater than 0")),
        ("text_input", "", ("''", "at least one token")),
        ("stop_words", ["x"] * 17, ("17 words", "at most 16")),
        ("bad_words", ["x" * 1025], ("1025 bytes", "at most 1024")),
    ],
    ids=lambda value: str(value)[:16],
)
def test_a_bad_input_of_a_stream_is_refused_by_name(
    streaming: LocalTriton, wire: StreamWire, name: str, value: object, parts: tuple[str, ...]
) -> None:
    streamed = wire(streaming, TWELVE | {name: value})
    assert not streamed.chunks
    assert streamed.error is not None
    assert [part for part in (name, *parts) if part not in streamed.error] == []
    assert_clean(streamed.error)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"temprature": 1.0}, {"text_input": None}], ids=str)
def test_a_bad_request_to_generate_stream_has_status_400(streaming: LocalTriton, bad: dict[str, object]) -> None:
    with Sse(streaming, {name: value for name, value in (TWELVE | bad).items() if value is not None}) as refused:
        assert refused.status == 400
        (event,) = refused.events()
    assert next(iter(bad)) in event["error"]


def test_requests_of_one_grpc_stream_are_told_apart_by_their_ids(streaming: LocalTriton) -> None:
    limits = {f"request {limit}": limit for limit in (9, 4, 0, 14, 1)}
    requests = {name: TWELVE | {"max_tokens": limit, "min_tokens": limit} for name, limit in limits.items()}
    texts: dict[str, str] = dict.fromkeys(limits, "")
    finals: list[str] = []
    errors: list[str] = []
    with GrpcStream(streaming) as open_stream:
        for name, request in requests.items():
            open_stream.ask({**request, "stream": True}, request_id=name)
        while len(finals) + len(errors) < len(limits):
            response = open_stream.next()
            if response.error is not None:
                errors.append(response.error)
                continue
            assert response.request_id not in finals
            texts[response.request_id] += "".join(row.text for row in response.rows)
            if response.final:
                finals.append(response.request_id)
        open_stream.end()
        assert open_stream.none_left()
    assert len(errors) == 1
    assert "max_tokens is 0" in errors[0]
    for name, limit in limits.items():
        assert not limit or texts[name] == ask(streaming, generate, **requests[name]).text


@pytest.mark.parametrize("empty_final", [False, True])
def test_the_final_flag_comes_once_with_the_last_chunk(streaming: LocalTriton, empty_final: bool) -> None:
    streamed = grpc_stream(streaming, TWELVE, empty_final=empty_final)
    assert (streamed.finals, streamed.empty) == ([len(streamed.chunks) - 1], 0)


def test_a_chunk_never_ends_inside_a_character(split: LocalTriton) -> None:
    """Every token of this model is a part of a character."""
    results = at_once([partial(both, split, STREAM_WIRES[seed % 3], **PARTS, seed=seed) for seed in range(24)])
    texts = [whole.text for whole, _ in results]
    for character in (SNAKE, "é", BROKEN):
        assert any(character in text for text in texts), f"no {character!r} was made: {texts}"
    chunks = [chunk for _, streamed in results for chunk in streamed.chunks]
    assert any(chunk.text == SNAKE and chunk.num_output_tokens > 1 for chunk in chunks)


def test_a_text_cut_inside_a_character_ends_in_a_replacement_character(split: LocalTriton) -> None:
    cut = PARTS | {"min_tokens": 0, "seed": 2}
    jobs = [partial(both, split, STREAM_WIRES[limit % 3], **cut | {"max_tokens": limit}) for limit in range(1, 25)]
    assert any(streamed.chunks[-1].text.endswith(BROKEN) for _, streamed in at_once(jobs))


@pytest.mark.parametrize("word", [SNAKE, f"{SNAKE} ", f" {SNAKE}", "é"])
def test_a_stop_string_of_partial_characters_is_never_sent(split: LocalTriton, word: str) -> None:
    requests = [PARTS | {"seed": seed, "min_tokens": 0, "stop_words": [word]} for seed in range(12)]
    known = at_once([partial(ask, split, generate, **one | {"stop_words": [""]}) for one in requests])
    results = at_once([partial(both, split, STREAM_WIRES[index % 3], **one) for index, one in enumerate(requests)])
    stopped = 0
    for answer, (whole, _) in zip(known, results, strict=True):
        assert word not in whole.text
        if word in answer.text:
            stopped += 1
            # A text that ends inside a broken character may show fewer replacement characters.
            assert answer.text.startswith(whole.text.rstrip(BROKEN))
            assert whole.finish_reason == "stop"
    assert stopped, f"no text had {word!r}: {known}"
