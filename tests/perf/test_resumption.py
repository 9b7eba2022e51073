"""`make resumption`: what two answers are compared by, and what its load has."""

from __future__ import annotations

import json
from itertools import product

import pytest

from perf.checkpoint import EMBEDDED
from perf.resumption.__main__ import compare
from perf.resumption.answers import Answer, read_answer
from perf.resumption.mix import FEATURES, SAMPLINGS, mixed


def _stream(*events: object) -> bytes:
    return b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events) + b"data: [DONE]\n\n"


def _event(text: str, index: int = 0, reason: str | None = None) -> object:
    choice = {"index": index, "delta": {"content": text}, "logprobs": {"content": [{"token": text}]}}
    return {"id": text, "choices": [{**choice, "finish_reason": reason}], "usage": None}


def test_a_stream_is_read_the_same_however_its_text_is_cut() -> None:
    whole = _stream(_event("ab", 1), _event("c", 1, "stop"), _event("d", 0, "length"))
    answer = read_answer(whole, 200, streamed=True)
    assert [choice["delta"]["content"] for choice in answer["choices"]] == ["d", "abc"]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop"]
    assert answer["choices"][1]["logprobs"]["content"] == [{"token": "ab"}, {"token": "c"}]
    cut = _stream(_event("d", 0, "length"), _event("ab", 1), _event("c", 1), _event("", 1, "stop"))
    assert read_answer(cut, 200, streamed=True)["choices"][1]["delta"] == answer["choices"][1]["delta"]


def test_an_answer_is_read_without_what_its_run_determines() -> None:
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 16}}
    body = json.dumps({"id": "a", "created": 1, "model": "m", "usage": usage}).encode()
    assert read_answer(body, 200, streamed=False) == {"model": "m", "usage": {"completion_tokens": 3}}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{}", 503),
        (_stream(_event("a"), {"error": {"message": "gone"}}), 200),
        (_stream(_event("a")).removesuffix(b"data: [DONE]\n\n"), 200),
    ],
)
def test_a_failed_or_unfinished_answer_is_an_error(body: bytes, status: int) -> None:
    with pytest.raises(ValueError, match=r"status 503|gone|ended early"):
        read_answer(body, status, streamed=True)


def test_answers_that_fail_or_differ_are_counted() -> None:
    reference = [Answer(0, "a", "", 1, 0.0), Answer(1, "b", "", 1, 0.0)]
    answers = [Answer(0, "a", "", 1, 0.0), Answer(1, "c", "", 1, 0.0), Answer(2, "", "gone", 0, 0.0)]
    assert compare(reference, answers) == {
        "errors": 1,
        "different": 1,
        "examples": ["2: gone", "1: at 0: c instead of b"],
    }


def test_the_load_has_every_feature_with_every_sampling_streamed_and_not() -> None:
    features = len(FEATURES["/v1/completions"])
    combinations = {
        (request.path, request.streamed, number % features, number % len(SAMPLINGS))
        for number, request in enumerate(mixed("a", EMBEDDED, 4 * features * len(SAMPLINGS)))
    }
    assert combinations == set(product(FEATURES, (False, True), range(features), range(len(SAMPLINGS))))
