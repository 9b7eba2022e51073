"""LiteLLM's provider `openai/` and its completion API."""

from __future__ import annotations

import asyncio
import json
import os

import litellm
import pytest
from end_to_end.clients.question import MODEL, QUESTION, Topic

MESSAGES = [{"role": "user", "content": QUESTION}]
ENDPOINT = {"api_base": os.environ["OPENAI_BASE_URL"], "api_key": "unused", "temperature": 0}
RESPONSE = {"model": f"openai/{MODEL}", "input": MESSAGES, **ENDPOINT}
CHAT = {"model": f"openai/{MODEL}", "messages": MESSAGES, **ENDPOINT}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": Topic.model_json_schema()}}


def test_streams_have_the_text_and_the_usage_of_the_whole_answer() -> None:
    whole = litellm.completion(max_tokens=6, **CHAT)
    chunks = list(litellm.completion(max_tokens=6, stream=True, stream_options={"include_usage": True}, **CHAT))
    joined = litellm.stream_chunk_builder(chunks)
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.choices[0].finish_reason == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6

    async def stream() -> str:
        chunks = await litellm.acompletion(max_tokens=6, stream=True, **CHAT)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(stream()) == whole.choices[0].message.content


def test_3000_max_tokens_are_refused_as_a_context_that_is_full() -> None:
    with pytest.raises(litellm.ContextWindowExceededError, match="max_tokens is 3000; it must be at most"):
        litellm.completion(max_tokens=3000, **CHAT)


def test_a_pydantic_model_is_the_form_of_an_answer() -> None:
    answer = litellm.completion(response_format=Topic, **CHAT)
    Topic.model_validate_json(answer.choices[0].message.content)


def test_a_streamed_call_is_joined_and_answered() -> None:
    called = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    chunks = list(litellm.completion(stream=True, **called, **CHAT))
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    Topic.model_validate_json(message.tool_calls[0].function.arguments)
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": json.dumps({"found": 2})}
    after = litellm.completion(
        **{**CHAT, "messages": [*MESSAGES, message.model_dump(), result]}, tools=[TOOL], tool_choice="none"
    )
    assert after.choices[0].message.content


def test_completions_of_several_prompts_are_in_order() -> None:
    model = f"text-completion-openai/{MODEL}"
    prompts = ["Return a list of", "Raise ValueError"]
    both = litellm.text_completion(model=model, prompt=prompts, max_tokens=5, logprobs=1, **ENDPOINT)
    alone = [litellm.text_completion(model=model, prompt=prompt, max_tokens=5, **ENDPOINT) for prompt in prompts]
    assert [choice.text for choice in both.choices] == [answer.choices[0].text for answer in alone]


def test_a_response_and_its_stream_have_the_same_text_and_usage() -> None:
    whole = litellm.responses(max_output_tokens=16, **RESPONSE)
    *events, last = list(litellm.responses(max_output_tokens=16, stream=True, **RESPONSE))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert last.response.usage.output_tokens == whole.usage.output_tokens == 16
