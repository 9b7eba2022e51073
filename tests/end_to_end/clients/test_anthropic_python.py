"""Anthropic's own Python library with the real model; tests/frontend has it in detail."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import MessageParam, ToolChoiceParam, ToolParam, ToolResultBlockParam
from end_to_end.clients.question import MODEL, QUESTION, Topic, look_up

MESSAGES: list[MessageParam] = [{"role": "user", "content": QUESTION}]
GREEDY = {"temperature": 0}
"""The library has no such field of its own."""
TOOL: ToolParam = {"name": "look_up", "description": "Look a kind up.", "input_schema": Topic.model_json_schema()}
ONE_CALL: ToolChoiceParam = {"type": "any", "disable_parallel_tool_use": True}


@pytest.fixture
def client(base_url: str) -> Iterator[anthropic.Anthropic]:
    url = base_url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0) as client:
        yield client


def test_a_stream_has_the_text_of_the_whole_answer(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(model=MODEL, messages=MESSAGES, max_tokens=6, extra_body=GREEDY)
    with client.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=6, extra_body=GREEDY) as stream:
        deltas = list(stream.text_stream)
    assert len(deltas) > 1
    assert [block.text for block in whole.content if block.type == "text"] == ["".join(deltas)]
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 6)


def test_counted_tokens_are_those_of_the_usage(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be short.", tools=[TOOL])
    answer = client.messages.create(
        model=MODEL, messages=MESSAGES, system="Be short.", tools=[TOOL], max_tokens=1, extra_body=GREEDY
    )
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_an_answer_is_parsed_into_a_pydantic_model(client: anthropic.Anthropic) -> None:
    answer = client.messages.parse(model=MODEL, messages=MESSAGES, max_tokens=64, output_format=Topic)
    assert isinstance(answer.parsed_output, Topic)


def test_a_tool_is_called_in_three_turns(client: anthropic.Anthropic) -> None:
    messages = [*MESSAGES]
    for _ in range(3):
        with client.messages.stream(
            model=MODEL, messages=messages, tools=[TOOL], tool_choice=ONE_CALL, max_tokens=64, extra_body=GREEDY
        ) as stream:
            answer = stream.get_final_message()
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert call.type == "tool_use"
        result: ToolResultBlockParam = {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": look_up(Topic.model_validate(call.input).kind),
        }
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(model=MODEL, messages=messages, tools=[TOOL], max_tokens=4, extra_body=GREEDY)
    assert last.usage.output_tokens == 4
