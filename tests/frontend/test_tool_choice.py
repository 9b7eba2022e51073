"""Tools of a chat: the prompt, forced calls, answers with calls, streamed calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from frontend.endpoints import Endpoint, Json, events_of
from frontend.fake_triton import FakeTriton
from httpx import Response
from openai.types.chat import ChatCompletion

PARAMETERS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}
ADD: Json = {"type": "function", "function": {"name": "add", "description": "Add one.", "parameters": PARAMETERS}}
CLOCK: Json = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
NAMED: Json = {"type": "function", "function": {"name": "add"}}
QUESTION = {"role": "user", "content": "a?"}


def _tokens(text: str) -> list[str]:
    return [text[start : start + 5] for start in range(0, len(text), 5)]


@pytest.mark.parametrize(
    ("text", "max_tokens", "content", "arguments", "reason"),
    [
        (f"One moment. {CALL}", 100, "One moment. ", '{"a": 1}', "tool_calls"),
        (CALL, 100, None, '{"a": 1}', "tool_calls"),
        (CALL, 2, CALL[:10], None, "length"),
        ("Hello.", 100, "Hello.", None, "stop"),
    ],
    ids=["text and a call", "a call alone", "cut off", "no call"],
)
def test_a_call_in_the_text_is_one_of_the_answer(
    served: Endpoint,
    triton: FakeTriton,
    text: str,
    max_tokens: int,
    content: str | None,
    arguments: str | None,
    reason: str,
) -> None:
    triton.tokens = _tokens(text)
    (choice,) = served.chat(tools=[ADD, CLOCK], max_tokens=max_tokens).json()["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == (content, reason)
    calls = [(call["type"], call["function"]) for call in message.get("tool_calls", [])]
    expected = {"name": "add", "arguments": arguments}
    assert calls == ([] if arguments is None else [("function", expected)])


@pytest.mark.parametrize("stream", [False, True])
def test_a_lone_surrogate_in_a_calls_arguments_is_an_escape_in_the_answer(
    served: Endpoint, triton: FakeTriton, stream: bool
) -> None:
    # JSON within a string, as some models write it.
    triton.tokens = _tokens('<tool_call>{"name": "add", "arguments": "{\\"a\\": \\"\\ud800\\"}"}</tool_call>')
    response = served.chat(tools=[ADD], stream=stream)
    assert response.status_code == 200
    assert "\\ud800" in response.text
    if stream:
        events_of(response)


def test_a_streamed_call_is_one_delta(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens(f"One moment. {CALL}")
    events = events_of(served.chat(tools=[ADD], stream=True))
    choices = [choice for event in events for choice in event["choices"]]  # type: ignore[attr-defined]  # JSON
    (call,) = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
    assert call["id"].startswith("call_")
    assert (call["index"], call["type"]) == (0, "function")
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_a_named_choice_makes_the_functions_schema_the_guide(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens('{"a": 7}')
    (answer,) = served.chat(tools=[ADD, CLOCK], tool_choice=NAMED).json()["choices"]
    guide = json.loads(str(triton.last.value("guided_decoding_guide")))
    assert guide.pop("x-guidance") == {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert guide == {**PARAMETERS, "additionalProperties": False}
    assert triton.last.value("guided_decoding_guide_type") == "json_schema"
    assert answer["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 7}'}
    assert answer["finish_reason"] == "stop"


def test_a_required_choice_makes_a_list_of_calls_the_guide(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens('[{"name": "add", "parameters": {"a": 7}}, {"name": "clock", "parameters": {}}]')
    (answer,) = served.chat(tools=[ADD, CLOCK], tool_choice="required").json()["choices"]
    schema = json.loads(str(triton.last.value("guided_decoding_guide")))
    assert schema["type"] == "array"
    assert schema["$defs"] == {"N": {"type": "integer"}}
    first, second = schema["items"]["anyOf"]
    assert first["properties"]["name"] == {"const": "add"}
    assert "$defs" not in first["properties"]["parameters"]
    assert second["properties"]["parameters"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert "maxItems" not in schema
    functions = [call["function"] for call in answer["message"]["tool_calls"]]
    assert functions == [{"name": "add", "arguments": '{"a": 7}'}, {"name": "clock", "arguments": "{}"}]
    assert answer["finish_reason"] == "tool_calls"


def test_without_parallel_calls_a_required_choice_is_one_call(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens('[{"name": "clock", "parameters": {}}]')
    fields: Json = {"tools": [CLOCK], "tool_choice": "required", "parallel_tool_calls": False}
    assert served.chat(**fields).status_code == 200
    assert json.loads(str(triton.last.value("guided_decoding_guide")))["maxItems"] == 1


@pytest.mark.parametrize("choice", [NAMED, "required"])
@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {"choice": ["a"]}, "user": "b"}, "user, structured_outputs"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_json": {}, "guided_whitespace_pattern": " "}, "guided_json, guided_whitespace_pattern"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "structured_outputs, structured_outputs.whitespace_pattern",
        ),
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "text", "kept"),
    [
        (NAMED, '{"a": 123456789}', 1),
        (NAMED, '{"a": 123456789}', 10),
        # What came is JSON.
        (NAMED, "123456789", 1),
        ("required", f"[{_CALLS[0]}]", 2),
        ("required", f"[{_CALLS[0]}]", len(_CALLS[0])),
    ],
)
def test_a_forced_call_that_is_cut_off_leaves_no_text(
    served: Endpoint, triton: FakeTriton, choice: object, text: str, kept: int, stream: bool
) -> None:
    triton.tokens = list(text)
    response = served.chat(tools=[ADD, CLOCK], tool_choice=choice, max_tokens=kept, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in events_of(response)]  # type: ignore[index]  # JSON
        assert [choice["delta"] for choice in choices] == [{"role": "assistant", "content": ""}, {}]
        assert choices[-1]["finish_reason"] == "length"
    else:
        (answer,) = response.json()["choices"]
        assert answer["message"] == {"role": "assistant", "content": "", "refusal": None}
        assert answer["finish_reason"] == "length"


def _calls(response: Response, stream: bool) -> tuple[list[Json], str]:
    """Return the functions of a chat's calls, and its finish reason."""
    bodies: list[Any] = list(events_of(response)) if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    parts = [choice["delta" if stream else "message"] for choice in choices]
    calls = [call for part in parts for call in part.get("tool_calls", [])]
    return [call["function"] for call in calls], choices[-1]["finish_reason"]


@pytest.mark.parametrize("stream", [False, True])
def test_forced_calls_that_are_cut_off_are_the_complete_ones(
    served: Endpoint, triton: FakeTriton, stream: bool
) -> None:
    text = f"[{', '.join(_CALLS)}]"
    triton.tokens = list(text)
    response = served.chat(tools=[ADD], tool_choice="required", max_tokens=len(text) - 3, stream=stream)
    expected = [{"name": "add", "arguments": f'{{"a": {number}}}'} for number in range(2)]
    assert _calls(response, stream) == (expected, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_forced_call_ends_the_list_and_the_generation(
    served: Endpoint, triton: FakeTriton, stream: bool
) -> None:
    # One or two choices end by themselves; the others would go on for ever.
    repeated = [f"[{_CALLS[0]}", *[f", {_CALLS[0]}"] * 9]
    triton.by_seed, triton.hold_after = lambda seed: repeated if seed % 2 else [f"[{_CALLS[0]}]"], 2
    response = served.chat(tools=[ADD], tool_choice="required", n=3, stream=stream)
    expected = {"name": "add", "arguments": '{"a": 0}'}
    assert _calls(response, stream) == ([expected] * 3, "tool_calls")
    triton.wait_for(lambda triton: len(triton.cancelled) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_off_leaves_no_logprobs(served: Endpoint, triton: FakeTriton, stream: bool) -> None:
    triton.tokens = ['{"apples":', " 1}"]
    chat = served.chat(tools=[ADD], tool_choice=NAMED, max_tokens=1, logprobs=True, stream=stream)
    assert '"finish_reason":"length"' in chat.text
    include, flat = ["message.output_text.logprobs"], {"type": "function", "name": "add"}
    response = served.respond(tools=[flat], tool_choice=flat, max_output_tokens=1, include=include, stream=stream)
    assert '"status":"incomplete"' in response.text
    assert "apples" not in chat.text + response.text


def test_a_template_without_tools_gets_them_in_the_system_message(served: Endpoint, triton: FakeTriton) -> None:
    messages = [{"role": "system", "content": "Be short."}, QUESTION]
    assert served.chat(messages=messages, tools=[ADD]).status_code == 200
    prompt = str(triton.last.value("text_input"))
    assert prompt.startswith("<s>[INST] <<SYS>>\nBe short.\n\nYou may call functions.")
    assert '"name": "add"' in prompt


def test_results_of_calls_are_user_turns_for_a_template_without_tools(served: Endpoint, triton: FakeTriton) -> None:
    def call(number: int) -> Json:
        return {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": f'{{"a": {number}}}'}}

    messages = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        QUESTION,
    ]
    response = served.chat(messages=messages, tools=[ADD])
    assert response.status_code == 200, response.text
    prompt = str(triton.last.value("text_input"))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>' in prompt
    assert "[INST] <tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\n\na? [/INST]" in prompt


def test_the_choice_none_hides_the_tools(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens(CALL)
    (choice,) = served.chat(tools=[ADD], tool_choice="none").json()["choices"]
    assert choice["message"]["content"] == CALL
    assert "add" not in str(triton.last.value("text_input"))


def test_an_answer_with_calls_can_be_sent_back_as_it_came(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = _tokens(CALL)
    message = ChatCompletion.model_validate(served.chat(tools=[ADD]).json()).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "2"}
    # With every field that OpenAI's library knows and the endpoint doesn't, null.
    response = served.chat(messages=[QUESTION, message.model_dump(), result], tools=[ADD])
    assert response.status_code == 200, response.text
    assert '"arguments": {"a": 1}' in str(triton.last.value("text_input"))
