"""Answers as the load generator reads them: tokens and their times, and nothing wrong taken for right."""

from __future__ import annotations

import json

import pytest

from perf.load.answers import Answer, AnswerError, answer_of
from perf.load.target import Protocol


def sse(*events: object) -> bytes:
    return b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)


def piece(text: str, tokens: int, finish: str = "", prompt: int = 0) -> dict[str, object]:
    counts = {"num_output_tokens": tokens, "num_input_tokens": prompt}
    return {"text_output": text, "finish_reason": finish, **counts}


def chunk(text: str, finish: str | None = None, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **more}


def usage(completion: int, prompt: int = 7) -> dict[str, object]:
    return {"usage": {"completion_tokens": completion, "prompt_tokens": prompt, "total_tokens": prompt + completion}}


PIECES = sse(piece("é", 1), piece(" b c", 3), piece("", 1, "length", prompt=7))
# vLLM's way: the last token comes with the finish_reason, then the usage alone, then a word that is not JSON.
VLLM = sse(chunk("é"), chunk(""), chunk("c", "length"), {"choices": [], **usage(3)}) + b"data: [DONE]\n\n"
# transformers serve's way: no null in the JSON, and the end, which has no token, with its usage.
SERVE = sse(
    {"choices": [{"index": 0, "text": "é"}]},
    {"choices": [{"index": 0, "text": "b"}]},
    {"choices": [{"index": 0, "text": "", "finish_reason": "length"}], **usage(2)},
)
UNARY = json.dumps(piece("all of it", 5, "length", prompt=7)).encode()


def read(protocol: Protocol, *chunks: bytes) -> Answer:
    """Feed chunk number n at time n, and the end one later."""
    answer = answer_of(protocol)
    for number, part in enumerate(chunks):
        answer.feed(part, float(number))
    answer.end(float(len(chunks)))
    return answer


@pytest.mark.parametrize(
    ("protocol", "body", "events", "tokens", "prompt"),
    [
        ("triton_stream", PIECES, 3, 5, 7),
        ("openai_completions", VLLM, 3, 3, 7),
        ("openai_completions", SERVE, 2, 2, 7),
        ("triton_generate", UNARY, 0, 5, 7),
        ("fastapi", b'{"text": "all", "tokens": 5}', 0, 5, None),
    ],
)
def test_counts_depend_on_where_the_bytes_were_split(
    protocol: Protocol, body: bytes, events: int, tokens: int, prompt: int | None
) -> None:
    splits = [[body], [body[place : place + 1] for place in range(len(body))]]
    splits += [[body[:border], body[border:]] for border in range(1, len(body), 7)]
    for chunks in splits:
        answer = read(protocol, *chunks)
        assert (len(answer.token_times), answer.output_tokens, answer.prompt_tokens) == (events, tokens, prompt)


def test_a_token_has_the_time_of_another_chunk_than_the_one_that_ended_its_event() -> None:
    first, second, last = PIECES.split(b"\n\n")[:3]
    answer = read("triton_stream", first[:10], first[10:], b"\n\n" + second + b"\n", b"\n" + last, b"\n\n")
    assert answer.token_times == [2.0, 3.0, 4.0]
    assert (answer.first_token, answer.last_token) == (2.0, 4.0)


def test_a_unary_answer_is_timed_before_it_is_whole() -> None:
    answer = read("triton_generate", UNARY[:20], UNARY[20:])
    assert (answer.first_token, answer.last_token) == (None, 2.0)


def test_tokens_that_are_never_text_leave_a_stream_without_a_time() -> None:
    end = sse({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], **usage(2)})
    assert read("openai_completions", b"", end).token_times == [2.0]


@pytest.mark.parametrize(
    ("protocol", "body", "message"),
    [
        ("triton_stream", sse(piece("a", 1), {"error": "out of\nslots"}), "answered with an error: out of\nslots"),
        ("openai_completions", sse(chunk("a"), {"error": {"message": "dead"}}), "answered with an error: .*dead"),
        ("triton_generate", b'{"error": "refused"}', "answered with an error: refused"),
        ("triton_stream", sse(piece("a", 1)), "without a finish_reason, after 1 events"),
        ("openai_completions", sse(chunk("a")), "without a finish_reason, after 1 events"),
        ("openai_completions", sse(chunk("a", "length")), "without a usage"),
        ("triton_stream", b"data: nonsense\n\n", "not JSON: b'nonsense'"),
        ("triton_stream", b"data: []\n\n", "must be a JSON object"),
        ("triton_generate", b"", "not JSON"),
        ("fastapi", b'{"text": "all"}', "tokens is None, must be an integer"),
        ("triton_stream", sse(piece("a", 1) | {"num_output_tokens": True}), "num_output_tokens is True"),
    ],
)
def test_a_bad_answer_is_taken_for_a_good_one(protocol: Protocol, body: bytes, message: str) -> None:
    with pytest.raises(AnswerError, match=message):
        read(protocol, body)
