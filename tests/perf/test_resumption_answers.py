"""`make resumption`: what two answers are compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from perf.load.records import Record
from perf.resumption.answers import compare, content

USAGE: Mapping[str, Any] = {
    "choices": [],
    "usage": {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
}


def _record(*objects: Mapping[str, Any], error: str = "") -> Record:
    return Record(0.0, error=error, answer=objects)


def _event(text: str, index: int = 0, reason: str | None = None) -> Mapping[str, Any]:
    choice = {"index": index, "delta": {"content": text}, "logprobs": {"content": [{"token": text}]}}
    return {"id": text, "created": 5, "choices": [{**choice, "finish_reason": reason}], "usage": None}


def test_a_stream_is_read_the_same_however_its_text_is_cut() -> None:
    whole = json.loads(content(_record(_event("ab", 1), _event("c", 1, "stop"), _event("d", 0, "length"), USAGE)))
    assert [choice["delta"]["content"] for choice in whole["choices"]] == ["d", "abc"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length", "stop"]
    assert whole["choices"][1]["logprobs"]["content"] == [{"token": "ab"}, {"token": "c"}]
    cut = _record(_event("d", 0, "length"), _event("ab", 1), _event("c", 1), _event("", 1, "stop"), USAGE)
    assert json.loads(content(cut))["choices"][1]["delta"] == whole["choices"][1]["delta"]


def test_the_pieces_of_a_calls_arguments_are_joined() -> None:
    deltas = [{"tool_calls": [{"index": 0, "id": "x", "function": {"name": "make", "arguments": "{"}}]}]
    deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    (choice,) = json.loads(content(_record(*events, USAGE)))["choices"]
    assert choice["delta"]["tool_calls"] == [{"index": 0, "function": {"name": "make", "arguments": "{}"}}]


def test_an_answer_is_read_without_what_its_run_determines() -> None:
    body = {"id": "a", "created": 1, "model": "m", **USAGE}
    body["choices"] = [{"index": 0, "message": {"tool_calls": [{"id": "b", "function": {"arguments": "{}"}}]}}]
    whole = json.loads(content(_record(body)))
    assert (whole.keys(), whole["usage"]) == ({"model", "choices", "usage"}, {"completion_tokens": 3})
    assert "id" not in whole["choices"][0]["message"]["tool_calls"][0]


def test_answers_that_fail_or_differ_are_counted() -> None:
    one, other = (_record(_event(text), USAGE) for text in "ab")
    records = [one, other, _record(error="gone"), one]
    errors, different = compare({"openai_chat": [one, one]}, {"openai_chat": records})
    assert errors == ["openai_chat 2: gone"]
    assert [line[:18] for line in different] == ["openai_chat 1: at "]
