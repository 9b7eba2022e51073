"""/v1/messages without a stream: the object, what its request's fields do."""

from __future__ import annotations

import json

import pytest
from anthropic.types import ModelInfo, TextBlock, ThinkingBlock, ToolUseBlock
from frontend.anthropic_types import assistant, read_message, user
from frontend.endpoints import Endpoint, Json, endpoint
from frontend.fake_triton import FakeTriton

SCHEMA: Json = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ADD: Json = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
CLOCK: Json = {"name": "clock", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
FORCED = ['[{"name": "add", ', '"parameters": {"a": 7}}]']
USER: Json = {"role": "user", "content": "a"}
FORMAT: Json = {"type": "json_schema", "schema": SCHEMA}


def _use(call_id: str, number: int = 1) -> Json:
    return {"type": "tool_use", "id": call_id, "name": "add", "input": {"a": number}}


def _result(call_id: str, content: object, **fields: object) -> Json:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def _text(text: str, **fields: object) -> Json:
    return {"type": "text", "text": text, **fields}


def test_a_message_is_anthropics_object(served: Endpoint, triton: FakeTriton) -> None:
    triton.cached_tokens = 2
    message = read_message(served.message())
    assert message.id.startswith("msg_")
    assert (message.model, message.stop_reason, message.stop_sequence) == ("pydoc-llama", "end_turn", None)
    assert message.content == [TextBlock(type="text", text=" Hello, world.")]
    assert message.usage.model_dump(exclude_none=True) == {
        "input_tokens": triton.last.prompt_tokens - 2,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 4,
        "output_tokens_details": {"thinking_tokens": 0},
    }


@pytest.mark.parametrize("system", ["Be\nshort.", [_text("Be", cache_control={"type": "ephemeral"}), _text("short.")]])
def test_system_is_a_message_in_front(served: Endpoint, triton: FakeTriton, system: object) -> None:
    assert served.message(system=system).status_code == 200
    assert triton.last.value("text_input") == "<s>[INST] <<SYS>>\nBe\nshort.\n<</SYS>>\n\nWhat is a list? [/INST]"


def test_results_and_texts_of_a_user_are_messages_in_their_order(served: Endpoint, triton: FakeTriton) -> None:
    turns = [
        {"role": "user", "content": "one"},
        assistant(_text("I add."), _use("1"), _use("2", 2)),
        user(_result("2", "3"), _result("1", [_text("2")], is_error=True)),
        {"role": "assistant", "content": "Done."},
        user(_text("two"), _text("three")),
    ]
    response = served.message(messages=turns, tools=[ADD])
    assert response.status_code == 200, response.text
    prompt = str(triton.last.value("text_input"))
    calls = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>' for n in (1, 2))
    assert f"[/INST] I add.\n{calls} </s>" in prompt
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert prompt.endswith(f"[INST] {results} [/INST] Done. </s><s>[INST] two\nthree [/INST]")
    assert response.headers["x-ignored-parameters"] == "messages.content.is_error"


def test_an_answer_can_be_sent_back_as_it_came(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", CALL]
    content = read_message(served.message(tools=[ADD])).content
    call = content[1]
    assert isinstance(call, ToolUseBlock)
    assert (call.name, call.input) == ("add", {"a": 1})
    # With every field that the library knows and the endpoint doesn't, null.
    turns = [USER, assistant(*(block.model_dump() for block in content)), user(_result(call.id, "2"))]
    response = served.message(messages=turns, tools=[ADD])
    assert response.status_code == 200, response.text
    assert "I add. \n<tool_call>" in str(triton.last.value("text_input"))


@pytest.mark.parametrize(
    ("tokens", "fields", "reason", "sequence"),
    [
        ([" Hello", "."], {}, "end_turn", None),
        ([" Hello", "."], {"max_tokens": 1}, "max_tokens", None),
        ([" Hello", "."], {"stop_sequences": ["."]}, "stop_sequence", "."),
        ([" ", CALL], {"tools": [ADD]}, "tool_use", None),
        ([CALL, CALL[:9], "more"], {"tools": [ADD], "max_tokens": 2}, "max_tokens", None),
        (FORCED, {"tools": [ADD], "tool_choice": {"type": "any"}}, "tool_use", None),
        (['{"a": 7}'], {"tools": [ADD], "tool_choice": {"type": "tool", "name": "add"}}, "tool_use", None),
        (FORCED, {"tools": [ADD], "tool_choice": {"type": "any"}, "max_tokens": 1}, "max_tokens", None),
    ],
)
def test_the_stop_reason_says_how_the_answer_ended(
    served: Endpoint, triton: FakeTriton, tokens: list[str], fields: Json, reason: str, sequence: str | None
) -> None:
    triton.tokens = tokens
    message = read_message(served.message(**fields))
    assert (message.stop_reason, message.stop_sequence) == (reason, sequence)


def test_one_call_at_most_where_parallel_ones_are_disabled(served: Endpoint, triton: FakeTriton) -> None:
    served.message(tools=[ADD, CLOCK], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert json.loads(str(triton.last.value("guided_decoding_guide")))["maxItems"] == 1


def test_tools_are_hidden_where_none_may_be_called(served: Endpoint, triton: FakeTriton) -> None:
    served.message(tools=[ADD], tool_choice={"type": "none"})
    assert "Adds." not in str(triton.last.value("text_input"))


def test_arguments_that_are_no_object_stay_text(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ['<tool_call>{"name": "add", "arguments": [1]}</tool_call>']
    message = read_message(served.message(tools=[ADD]))
    assert message.content == [TextBlock(type="text", text='{"name":"add","arguments":"[1]"}')]
    assert message.stop_reason == "end_turn"


def test_thinking_is_a_block_before_the_text(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<th", "ink>", "\nA sum.", "\n</think>", "\n\n4"]
    message = read_message(qwen3.message())
    thought = ThinkingBlock(type="thinking", thinking="A sum.", signature="")
    assert message.content == [thought, TextBlock(type="text", text="4")]
    assert message.usage.output_tokens_details is not None
    assert 0 < message.usage.output_tokens_details.thinking_tokens <= 5
    redacted: Json = {"type": "redacted_thinking", "data": "x"}
    answer = assistant(*(block.model_dump() for block in message.content), redacted, _use("1"))
    response = qwen3.message(messages=[USER, answer, user(_result("1", "4"))])
    assert "<think>\nA sum.\n</think>\n\n4" in str(triton.last.value("text_input"))
    assert response.headers["x-ignored-parameters"] == "messages.content.data, messages.content.signature"


@pytest.mark.parametrize(
    ("thinking", "closed"),
    [({"type": "disabled"}, True), ({"type": "enabled", "budget_tokens": 1024}, False), ({"type": "adaptive"}, False)],
)
def test_thinking_is_the_templates_switch(qwen3: Endpoint, triton: FakeTriton, thinking: Json, closed: bool) -> None:
    response = qwen3.message(thinking=thinking)
    assert str(triton.last.value("text_input")).endswith("</think>\n\n") is closed
    assert response.headers.get("x-ignored-parameters") == ("thinking.budget_tokens" if len(thinking) == 2 else None)


def test_an_assistants_last_text_is_continued(served: Endpoint, triton: FakeTriton) -> None:
    read_message(served.message(messages=[USER, {"role": "assistant", "content": "It is ("}]))
    assert str(triton.last.value("text_input")).endswith("[/INST] It is (")


def test_a_last_message_with_a_call_is_not_continued(served: Endpoint, triton: FakeTriton) -> None:
    read_message(served.message(messages=[USER, assistant(_text("one"), _use("1"), _text("two"))], tools=[ADD]))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert str(triton.last.value("text_input")).endswith(f"[/INST] one\ntwo\n{call} </s>")


def test_messages_are_counted_with_system_and_results(triton: FakeTriton) -> None:
    results = user(_result("1", "a"), _result("1", "b"))
    with endpoint(triton.port, max_messages=3) as served:
        assert "'4 messages with system" in served.message(messages=[USER] * 4).text
        derived = served.message(messages=[assistant(_use("1")), results], system="a")
        assert "'4 messages with system and each tool_result'; it must be at most 3" in derived.text


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORMAT, "effort": "low"}}, {"output_format": FORMAT}])
def test_an_output_format_is_the_guide(served: Endpoint, triton: FakeTriton, fields: Json) -> None:
    read_message(served.message(**fields))
    assert json.loads(str(triton.last.value("guided_decoding_guide")))["required"] == ["a"]


def test_fields_without_effect_are_named(served: Endpoint) -> None:
    fields: Json = {
        "metadata": {"user_id": "me"},
        "service_tier": "auto",
        "context_management": {"edits": []},
        "inference_geo": "us",
        "cache_control": {"type": "ephemeral"},
        "tools": [ADD | {"defer_loading": False, "eager_input_streaming": True, "type": "custom"}],
    }
    response = served.http.post(
        "/v1/messages?beta=true",
        json={"max_tokens": 4, "messages": [USER], **fields},
        headers={"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"},
    )
    read_message(response)
    assert sorted(response.headers["x-ignored-parameters"].split(", ")) == [
        *("anthropic-beta", "cache_control", "context_management", "inference_geo", "metadata", "service_tier"),
        *("tools.defer_loading", "tools.eager_input_streaming"),
    ]


@pytest.mark.parametrize("fields", [{}, {"system": "Be short.", "tools": [ADD, CLOCK]}])
def test_counted_tokens_are_those_of_the_prompt(served: Endpoint, triton: FakeTriton, fields: Json) -> None:
    turns = [USER, assistant(_text("<s>"), _use("1")), user(_result("1", "2"))]
    counted = served.http.post("/v1/messages/count_tokens", json={"messages": turns, **fields})
    assert triton.requests == []
    assert served.message(messages=turns, **fields).status_code == 200
    ids = triton.last.inputs["input_ids"]
    assert counted.json() == {"input_tokens": len(ids)}


def test_models_have_anthropics_fields(served: Endpoint) -> None:
    body = served.http.get("/v1/models").json()
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "pydoc-llama", "pydoc-llama")
    (model,) = body["data"]
    info = ModelInfo.model_validate_json(json.dumps(model), strict=True)
    assert (info.display_name, info.max_input_tokens) == ("pydoc-llama", 2048)
