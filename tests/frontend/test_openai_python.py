"""OpenAI's Python library, where end_to_end/clients doesn't use it: completions, errors, tool results.

Responses too: the library's helpers parse them, streamed or not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from frontend.endpoints import Endpoint
from frontend.fake_triton import FakeTriton
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

MODEL = "pydoc-llama"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a list?"}]
TOOL: ChatCompletionToolParam = {"type": "function", "function": {"name": "add"}}


@pytest.fixture
def client(served: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.base_url, api_key="unused", max_retries=0) as client:
        yield client


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


def test_completions_are_read_by_the_library(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], logprobs=1, echo=True)
    assert [choice.text for choice in answer.choices] == ["a Hello, world.", "b Hello, world."]
    chunks = client.completions.create(model=MODEL, prompt="a", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == " Hello, world."


def test_a_prediction_is_counted_as_the_library_reads_it(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.draft_tokens = (3, 0)
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, prediction={"type": "content", "content": " Hello, you."}
    )
    assert triton.last.value("prediction") == " Hello, you."
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (3, 0)


def test_errors_are_the_librarys_own_with_the_field(client: openai.OpenAI, triton: FakeTriton) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=5)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=MESSAGES)
    triton.failing = "Exceeds maximum queue size"
    with pytest.raises(openai.InternalServerError) as full:
        client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert full.value.status_code == 503


def test_an_error_within_a_stream_is_raised(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.failing = "INTERNAL: the server's log has the reason"
    triton.after_tokens = 2
    with pytest.raises(openai.APIError, match="the server's log has the reason"):
        list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
