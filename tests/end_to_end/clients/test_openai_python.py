"""OpenAI's own Python library with the real model; tests/frontend has it in detail."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from end_to_end.clients.question import MODEL, QUESTION, Topic
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="unused", max_retries=0) as client:
        yield client


def test_the_model_is_listed_and_completes_a_text(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    answer = client.completions.create(model=MODEL, prompt=[QUESTION, "Return"], temperature=0, max_tokens=6)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * len(answer.choices) == 12


async def test_a_stream_and_asyncio_have_the_text_of_the_whole_answer(client: openai.OpenAI, base_url: str) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=6)
    chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=6, stream=True)
    text = whole.choices[0].message.content
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    async with openai.AsyncOpenAI(base_url=base_url, api_key="unused", max_retries=0) as other:
        same = await other.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=6)
        assert same.choices[0].message.content == text


def test_a_streamed_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Topic) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Topic)


def test_a_required_tool_is_called_with_arguments_of_its_pydantic_model(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Topic)
    # A small model writes call after call, until its context is full.
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert [type(call.function.parsed_arguments) for call in calls] == [Topic] * len(calls)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_response_is_streamed_as_typed_events(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=6)
    events = list(client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=6, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.usage is not None
    assert last.response.usage.output_tokens == 6
