"""Fields of OpenAI's protocol with the real model: choices, logprobs, structured output, tools, usage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from frontend.endpoints import Endpoint, Json, events_of
from server.openai_endpoint import in_front_of
from triton_local.server import LocalTriton

CONTEXT = 512
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["list", "dict"]}, "size": {"enum": [1, 22]}},
    "required": ["kind", "size"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "make", "parameters": SCHEMA}}
ANSWERS = [{"kind": kind, "size": size} for kind in ("list", "dict") for size in (1, 22)]


@pytest.fixture(scope="module")
def served(streaming: LocalTriton) -> Iterator[Endpoint]:
    with in_front_of(streaming) as endpoint:
        yield endpoint


def _chat(served: Endpoint, **fields: object) -> list[Json]:
    """Return the choices of a chat that isn't streamed."""
    response = served.chat(**fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert isinstance(choices, list)
    return choices


def _streamed(served: Endpoint, **fields: object) -> dict[int, tuple[str, str, str]]:
    """Return, of each choice of a streamed chat, its text, its calls' arguments and its finish reason."""
    found: dict[int, tuple[str, str, str]] = {}
    for event in events_of(served.chat(stream=True, **fields)):
        assert isinstance(event["choices"], list)
        for choice in event["choices"]:
            text, arguments, reason = found.get(choice["index"], ("", "", ""))
            delta = choice["delta"]
            calls = delta.get("tool_calls", [])
            arguments += "".join(call["function"].get("arguments", "") for call in calls)
            found[choice["index"]] = (text + (delta.get("content") or ""), arguments, choice["finish_reason"] or reason)
    return found


def _message(choice: Json) -> Json:
    message = choice["message"]
    assert isinstance(message, dict)
    return message


def test_choices_are_the_same_streamed_or_not_and_the_first_is_that_of_its_seed(served: Endpoint) -> None:
    asked = {"temperature": 1, "seed": 7, "max_tokens": 12}
    texts = [_message(choice)["content"] for choice in _chat(served, n=3, **asked)]
    assert len(set(texts)) > 1
    assert texts[0] == _message(_chat(served, **asked)[0])["content"]
    streamed = _streamed(served, n=3, **asked)
    assert [streamed[index][0] for index in range(3)] == texts


def test_without_max_tokens_the_text_may_fill_the_context(served: Endpoint) -> None:
    answer = served.complete(ignore_eos=True, temperature=0).json()
    assert answer["usage"]["total_tokens"] == CONTEXT
    assert answer["choices"][0]["finish_reason"] == "length"


def test_usage_is_the_same_streamed_or_not_and_says_what_was_cached(served: Endpoint) -> None:
    asked: dict[str, object] = {"prompt": [[5, 6, 7], [8, 9]], "n": 2, "max_tokens": 5, "ignore_eos": True}
    usage = served.complete(**asked).json()["usage"]
    events = events_of(served.complete(stream=True, stream_options={"include_usage": True}, **asked))
    assert events[-1]["usage"] == usage
    assert usage["completion_tokens"] == 4 * 5
    assert usage["prompt_tokens"] == 3 + 2
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0


def test_a_stop_string_ends_the_text_and_is_named(served: Endpoint) -> None:
    whole = str(_message(_chat(served, temperature=0, max_tokens=20)[0])["content"])
    stop = whole[5:8]
    (choice,) = _chat(served, temperature=0, max_tokens=20, stop=[stop])
    assert _message(choice)["content"] == whole[: whole.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


def test_the_logprobs_of_a_chat_are_of_its_tokens(served: Endpoint) -> None:
    (choice,) = _chat(served, temperature=0, repetition_penalty=1, max_tokens=8, logprobs=True, top_logprobs=2)
    logprobs = choice["logprobs"]
    assert isinstance(logprobs, dict)
    assert "".join(token["token"] for token in logprobs["content"]) == _message(choice)["content"]
    for token in logprobs["content"]:
        likeliest, second = token["top_logprobs"]
        # Greedy.
        assert token["logprob"] == likeliest["logprob"] >= second["logprob"]
        assert bytes(token["bytes"]).decode() == token["token"]


def test_an_echoed_prompt_has_logprobs_with_the_offsets_of_its_tokens(served: Endpoint) -> None:
    answer = served.complete(prompt="Return a list of", max_tokens=4, temperature=0, echo=True, logprobs=1).json()
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith("Return a list of")
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset : offset + len(token)] == token


@pytest.mark.parametrize(
    ("fields", "form"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, None),
        ({"guided_json": SCHEMA}, None),
        ({"guided_regex": "(ab|cd)[0-9]{3}"}, "(ab|cd)[0-9]{3}"),
        ({"guided_choice": ["yes", 'no "really"\n']}, 'yes|no "really"\n'),
        ({"structured_outputs": {"choice": ["x", "yz"]}}, "x|yz"),
        ({"guided_grammar": 'root ::= "a" root | "b"'}, "a*b"),
    ],
)
def test_a_structured_text_has_its_form(served: Endpoint, fields: dict[str, object], form: str | None) -> None:
    for choice in _chat(served, temperature=1, seed=5, n=2, max_tokens=60, **fields):
        text = str(_message(choice)["content"])
        assert choice["finish_reason"] == "stop", text
        if form is None:
            assert json.loads(text) in ANSWERS
        else:
            assert re.fullmatch(form, text)


def test_a_json_object_begins_and_a_schema_that_is_refused_names_the_field(served: Endpoint) -> None:
    (choice,) = _chat(served, max_tokens=10, response_format={"type": "json_object"})
    assert str(_message(choice)["content"]).lstrip().startswith("{")
    response = served.chat(guided_regex="(")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "make"}}])
def test_a_forced_call_has_valid_arguments_streamed_or_not(served: Endpoint, choice: object) -> None:
    asked = {"tools": [TOOL], "tool_choice": choice, "temperature": 1, "seed": 3, "max_tokens": 280}
    (found,) = _chat(served, parallel_tool_calls=False, **asked)
    calls = _message(found)["tool_calls"]
    assert isinstance(calls, list)
    (call,) = calls
    assert call["function"]["name"] == "make"
    assert json.loads(call["function"]["arguments"]) in ANSWERS
    assert found["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    (text, arguments, reason) = _streamed(served, parallel_tool_calls=False, **asked)[0]
    assert (text, arguments, reason) == ("", call["function"]["arguments"], found["finish_reason"])
