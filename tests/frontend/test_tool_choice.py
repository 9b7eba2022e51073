"""Tools of a chat: the prompt, forced calls, answers with calls, streamed calls."""

from __future__ import annotations

from typing import Any

import pytest
from frontend.endpoints import Endpoint, Json, events_of
from frontend.fake_triton import FakeTriton
from openai.types.chat import ChatCompletion

PARAMETERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
ADD: Json = {"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": PARAMETERS}}
CLOCK: Json = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NAMED: Json = {"type": "function", "function": {"name": "add"}}
QUESTION = {"role": "user", "content": "a?"}


def _tokens(text: str) -> list[str]:
    return [text[start : start + 5] for start in range(0, len(text), 5)]


def _functions(choice: dict[str, Any]) -> list[Json]:
    """Return the functions that a choice, or the event of one, calls."""
    message = choice.get("message") or choice["delta"]
    return [call["function"] for call in message.get("tool_calls", [])]


@pytest.mark.parametrize(
    ("text", "max_tokens", "content", "num_calls", "reason"),
    [
        (f"One moment. {CALL}", 100, "One moment. ", 1, "tool_calls"),
        (CALL, 100, None, 1, "tool_calls"),
        (CALL, 2, CALL[:10], 0, "length"),
    ],
    ids=["text and a call", "a call alone", "cut off"],
)
def test_a_call_in_the_text_is_one_of_the_answer(
    served: Endpoint, triton: FakeTriton, text: str, max_tokens: int, content: str | None, num_calls: int, reason: str
) -> None:
    triton.tokens = _tokens(text)
    (choice,) = served.chat(tools=[ADD, CLOCK], max_tokens=max_tokens).json()["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (content, reason)
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls", [])]
    assert calls == [("function", {"name": "add", "arguments": '{"a": 1}'})] * num_calls


def test_a_lone_surrogate_in_a_calls_arguments_is_an_escape_in_the_answer(served: Endpoint, triton: FakeTriton) -> None:
    # JSON within a string, as some models write it.
    triton.tokens = _tokens('<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>')
    for stream in (False, True):
        response = served.chat(tools=[ADD], stream=stream)
        assert response.status_code == 200
        assert "\\ud800" in response.text
    assert events_of(response)


def test_a_named_choice_makes_the_functions_schema_the_guide(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens('{"a": 7}')
    (answer,) = served.chat(tools=[ADD, CLOCK], tool_choice=NAMED).json()["choices"]
    guide = triton.guide
    assert guide.pop("x-guidance") == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert guide == {**PARAMETERS, "additionalProperties": False}
    assert triton.last.value("guided_decoding_guide_type") == "json_schema"
    assert _functions(answer) == [{"name": "add", "arguments": '{"a": 7}'}]
    assert answer["finish_reason"] == "stop"


def test_a_required_choice_makes_a_list_of_calls_the_guide(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens('[{"name": "add", "parameters": {"a": 7}}, {"name": "clock", "parameters": {}}]')
    (answer,) = served.chat(tools=[ADD, CLOCK], tool_choice="required").json()["choices"]
    schema = triton.guide
    assert schema["type"] == "array"
    assert schema["$defs"] == {"N": {"type": "integer"}}
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"const": "add"}
    assert "$defs" not in first["properties"]["parameters"]
    assert second["properties"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert "maxItems" not in schema
    assert _functions(answer) == [{"name": "add", "arguments": '{"a": 7}'}, {"name": "clock", "arguments": "{}"}]
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"response_format": {"type": "json_object"}, "user": "b"}, "user, response_format"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
    ],
)
def test_a_forced_call_wins_over_another_guide(
    served: Endpoint, triton: FakeTriton, choice: object, fields: Json, ignored: str
) -> None:
    response = served.chat(tools=[ADD], tool_choice=choice, **fields)
    assert response.headers["x-ignored-parameters"] == ignored
    assert triton.last.value("guided_decoding_guide_type") == "json_schema"
    assert '"integer"' in str(triton.last.value("guided_decoding_guide"))


_CALLS = [f'{{"name": "add", "parameters": {{"a": {number}}}}}' for number in range(3)]


@pytest.mark.parametrize(
    ("choice", "text", "kept"),
    # What came of the second one is JSON.
    [(NAMED, '{"a": 123456789}', 10), (NAMED, "123456789", 1), ("required", f"[{_CALLS[0]}]", len(_CALLS[0]))],
)
def test_a_forced_call_that_is_cut_off_leaves_no_text(
    served: Endpoint, triton: FakeTriton, choice: object, text: str, kept: int
) -> None:
    triton.tokens = list(text)
    answer = served.chat(tools=[ADD, CLOCK], tool_choice=choice, max_tokens=kept).json()["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert answer["finish_reason"] == "length"


def test_a_cut_off_list_of_forced_calls_has_the_complete_ones(served: Endpoint, triton: FakeTriton) -> None:
    text = f"[{', '.join(_CALLS)}]"
    triton.tokens = list(text)
    (answer,) = served.chat(tools=[ADD], tool_choice="required", max_tokens=len(text) - 3).json()["choices"]
    assert _functions(answer) == [{"name": "add", "arguments": f'{{"a": {number}}}'} for number in range(2)]
    assert answer["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_forced_call_ends_the_generation(served: Endpoint, triton: FakeTriton, stream: bool) -> None:
    # One or two choices end by themselves; the others would go on for ever.
    repeated = [f"[{_CALLS[0]}", *[f", {_CALLS[0]}"] * 9]
    triton.by_seed, triton.hold_after = lambda seed: repeated if seed % 2 else [f"[{_CALLS[0]}]"], 2
    response = served.chat(tools=[ADD], tool_choice="required", n=3, stream=stream)
    answers: list[dict[str, Any]] = events_of(response) if stream else [response.json()]
    choices = [choice for answer in answers for choice in answer["choices"]]
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert [call for choice in own for call in _functions(choice)] == [{"name": "add", "arguments": '{"a": 0}'}]
        assert own[-1]["finish_reason"] == "tool_calls"
    triton.wait_for(lambda triton: len(triton.cancelled) == 1)


def test_a_forced_call_that_is_cut_off_leaves_no_logprobs(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ['{"apples":', " 1}"]
    chat = served.chat(tools=[ADD], tool_choice=NAMED, max_tokens=1, logprobs=True)
    assert '"finish_reason":"length"' in chat.text
    include, flat = ["message.output_text.logprobs"], {"type": "function", "name": "add"}
    response = served.respond(tools=[flat], tool_choice=flat, max_output_tokens=1, include=include)
    assert '"status":"incomplete"' in response.text
    assert "apples" not in chat.text + response.text


def test_an_answer_with_calls_can_be_sent_back_as_it_came(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens(CALL)
    message = ChatCompletion.model_validate(served.chat(tools=[ADD]).json()).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    # With every field that OpenAI's library knows and the endpoint doesn't, null.
    response = served.chat(messages=[QUESTION, message.model_dump(), result], tools=[ADD])
    assert response.status_code == 200, response.text
    assert '"arguments": {"a": 1}' in triton.prompt
