"""OpenAI's own Python library against the endpoint: nothing of it is adapted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import grpc
import openai
import pytest
import pytest_asyncio
from frontend.endpoints import Endpoint
from frontend.fake_triton import FakeTriton
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from pydantic import BaseModel

MODEL = "pydoc-llama"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a list?"}]
TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "add",
        # The library joins streamed calls of strict functions only.
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


class Answer(BaseModel):
    """What `parse` makes of an answer."""

    text: str
    number: int


@pytest.fixture
def client(served: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def async_client(served: Endpoint) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_completion_tokens=10)
    assert answer.choices[0].message.content == " Hello, world."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 4


def test_a_streamed_chat(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == " Hello, world."
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_an_asyncio_chat_streamed_and_not(async_client: openai.AsyncOpenAI) -> None:
    answer = await async_client.chat.completions.create(model=MODEL, messages=MESSAGES, n=2)
    assert [choice.message.content for choice in answer.choices] == [" Hello, world."] * 2
    text = ""
    async for chunk in await async_client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == " Hello, world."


def test_an_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ['{"text": "a', ' list", ', '"number": 7}']
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Answer)
    assert answer.choices[0].message.parsed == Answer(text="a list", number=7)
    schema = json.loads(str(triton.last.value("guided_decoding_guide")))
    assert schema["required"] == ["text", "number"]


def test_a_streamed_answer_is_parsed_into_a_pydantic_model(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ['{"text": "a', ' list", ', '"number": 7}']
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, response_format=Answer) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Answer(text="a list", number=7)


def test_a_round_of_tool_calls(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ['<tool_call>\n{"name": "add", ', '"arguments": {"a": 1}}\n', "</tool_call>"]
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL])
    message = answer.choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"a": 1}
    triton.tokens = [" Two."]
    back: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        message.model_dump(),  # type: ignore[list-item]  # what the library's own examples send
        {"role": "tool", "tool_call_id": call.id, "content": "2"},
    ]
    second = client.chat.completions.create(model=MODEL, messages=back, tools=[TOOL])
    assert second.choices[0].message.content == " Two."


def test_streamed_tool_calls_are_joined_by_the_library(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ['[{"name": "add", ', '"parameters": {"a"', ": 1}}, ", '{"name": "add", "parameters": {"a": 2}}]']
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required") as stream:
        final = stream.get_final_completion()
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert [call.function.arguments for call in calls] == ['{"a": 1}', '{"a": 2}']
    assert final.choices[0].finish_reason == "tool_calls"


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content[0].top_logprobs] == [" Hello", " Hello0"]


def test_completions_streamed_and_not(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["a Hello, world.", "b Hello, world."]
    chunks = client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == " Hello, world."


def test_vllms_extra_fields_go_through_extra_body(client: openai.OpenAI, triton: FakeTriton) -> None:
    extra = {"top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5, "guided_choice": ["a"], "priority": 1}
    client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=extra)
    assert triton.last.value("top_k") == 3
    assert triton.last.value("guided_decoding_guide") == 'root ::= "a"'


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "triton-llama"


def test_errors_are_the_librarys_own_with_the_field(client: openai.OpenAI, triton: FakeTriton) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        client.embeddings.create(model=MODEL, input="a")
    triton.failing = (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")
    with pytest.raises(openai.InternalServerError) as full:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert full.value.status_code == 503


def test_an_error_within_a_stream_is_raised(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.failing = (grpc.StatusCode.INTERNAL, "the server's log has the reason")
    triton.after_tokens = 2
    with pytest.raises(openai.APIError, match="the server's log has the reason"):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))


def test_a_stream_that_is_closed_early_is_cancelled(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.hold_after = 2
    with client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True) as stream:
        next(stream)
    triton.wait_for(lambda fake: bool(fake.cancelled))
