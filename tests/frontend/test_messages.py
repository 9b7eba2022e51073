"""/v1/messages without a stream: the object, what its request's fields do."""

from __future__ import annotations

import json

import pytest
from anthropic.types import ModelInfo, TextBlock, ThinkingBlock, ToolUseBlock
from frontend.client_types import assistant, read_message, user
from frontend.endpoints import Endpoint, Json
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


def test_system_is_a_message_in_front(served: Endpoint, triton: FakeTriton) -> None:
    system = [_text("Be", cache_control={"type": "ephemeral"}), _text("short.")]
    assert served.message(system=system).status_code == 200
    assert triton.prompt == "<s>[INST] <<SYS>>\nBe\nshort.\n<</SYS>>\n\nWhat is a list? [/INST]"


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
    calls = "\n".join(f'<tool_call>\n{{"name": "add", "arguments": {{"a": {n}}}}}\n</tool_call>' for n in (1, 2))
    assert f"[/INST] I add.\n{calls} </s>" in triton.prompt
    results = "<tool_response>\n3\n</tool_response>\n<tool_response>\n2\n</tool_response>"
    assert triton.prompt.endswith(f"[INST] {results} [/INST] Done. </s><s>[INST] two\nthree [/INST]")
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
    assert "I add. \n<tool_call>" in triton.prompt


@pytest.mark.parametrize(
    ("tokens", "fields", "reason", "sequence"),
    [
        ([" Hello", "."], {"max_tokens": 1}, "max_tokens", None),
        ([" Hello", "."], {"stop_sequences": ["."]}, "stop_sequence", "."),
        ([" ", CALL], {"tools": [ADD]}, "tool_use", None),
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
    assert "<think>\nA sum.\n</think>\n\n4" in triton.prompt
    assert response.headers["x-ignored-parameters"] == "messages.content.data, messages.content.signature"


def test_thinking_is_the_templates_switch(qwen3: Endpoint, triton: FakeTriton) -> None:
    assert "x-ignored-parameters" not in qwen3.message(thinking={"type": "disabled"}).headers
    assert triton.prompt.endswith("</think>\n\n")
    response = qwen3.message(thinking={"type": "enabled", "budget_tokens": 1024})
    assert not triton.prompt.endswith("</think>\n\n")
    assert response.headers["x-ignored-parameters"] == "thinking.budget_tokens"


def test_tool_choice_hides_tools_or_allows_one_call(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = [CALL]
    message = read_message(served.message(tools=[ADD], tool_choice={"type": "none"}))
    assert message.content == [TextBlock(type="text", text=CALL)]
    assert "Adds." not in triton.prompt
    served.message(tools=[ADD, CLOCK], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert triton.guide["maxItems"] == 1


def test_a_last_message_is_continued_unless_it_has_a_call(served: Endpoint, triton: FakeTriton) -> None:
    read_message(served.message(messages=[USER, {"role": "assistant", "content": "It is ("}]))
    assert triton.prompt.endswith("[/INST] It is (")
    read_message(served.message(messages=[USER, assistant(_text("one"), _use("1"), _text("two"))], tools=[ADD]))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert triton.prompt.endswith(f"[/INST] one\ntwo\n{call} </s>")


@pytest.mark.parametrize("fields", [{"output_config": {"format": FORMAT, "effort": "low"}}, {"output_format": FORMAT}])
def test_an_output_format_is_the_guide(served: Endpoint, triton: FakeTriton, fields: Json) -> None:
    read_message(served.message(**fields))
    assert triton.guide["required"] == ["a"]


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


def test_counted_tokens_are_those_of_the_prompt(served: Endpoint, triton: FakeTriton) -> None:
    turns = [USER, assistant(_text("<s>"), _use("1")), user(_result("1", "2"))]
    fields: Json = {"messages": turns, "system": "Be short.", "tools": [ADD, CLOCK]}
    counted = served.post("/v1/messages/count_tokens", **fields)
    assert triton.requests == []
    assert served.message(**fields).status_code == 200
    assert counted.json() == {"input_tokens": len(triton.last.inputs["input_ids"])}


def test_models_have_anthropics_fields(served: Endpoint) -> None:
    body = served.http.get("/v1/models").json()
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, "pydoc-llama", "pydoc-llama")
    (model,) = body["data"]
    info = ModelInfo.model_validate_json(json.dumps(model), strict=True)
    assert (info.display_name, info.max_input_tokens) == ("pydoc-llama", 2048)
