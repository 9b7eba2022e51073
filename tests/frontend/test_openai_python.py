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
from openai.types.responses import FunctionToolParam, ResponseInputParam, ToolChoiceFunctionParam
from pydantic import BaseModel

MODEL = "pydoc-llama"
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a list?"}]
TOOL: ChatCompletionToolParam = {"type": "function", "function": {"name": "add"}}
FUNCTION: FunctionToolParam = {"type": "function", "name": "add", "parameters": None, "strict": None}


class Sum(BaseModel):
    """Add numbers."""

    a: int


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


def test_the_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "triton-llama"


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


def test_a_round_of_function_calls(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>']
    answer = client.responses.create(model=MODEL, input="a?", tools=[FUNCTION])
    assert answer.output_text == "I add. "
    call = answer.output[1]
    assert call.type == "function_call"
    triton.tokens = [" Two."]
    items: ResponseInputParam = [
        {"role": "user", "content": "a?"},
        *answer.output,  # type: ignore[list-item]  # the library's own examples send it back so
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    assert client.responses.create(model=MODEL, input=items, tools=[FUNCTION]).output_text == " Two."


def test_a_response_is_parsed_into_a_pydantic_model(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ['{"a":', " 1}"]
    assert client.responses.parse(model=MODEL, input="a?", text_format=Sum).output_parsed == Sum(a=1)


def test_a_streamed_response_is_parsed_into_a_pydantic_model(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ['{"a":', " 1}"]
    with client.responses.stream(model=MODEL, input="a?", text_format=Sum) as stream:
        texts = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert texts == ['{"a":', '{"a": 1}']
        assert stream.get_final_response().output_parsed == Sum(a=1)


def test_a_streamed_call_is_parsed_with_its_arguments(client: openai.OpenAI, triton: FakeTriton) -> None:
    triton.tokens = ['{"a":', " 1}"]
    tool = openai.pydantic_function_tool(Sum, name="add")["function"]
    function: FunctionToolParam = {"type": "function", "name": "add", "parameters": tool["parameters"], "strict": True}
    choice: ToolChoiceFunctionParam = {"type": "function", "name": "add"}
    with client.responses.stream(model=MODEL, input="a?", tools=[function], tool_choice=choice) as stream:
        (call,) = stream.get_final_response().output
    assert call.type == "function_call"
    assert call.parsed_arguments == {"a": 1}


def test_a_refused_response_is_the_librarys_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.responses.create(model=MODEL, input="a", previous_response_id="resp_1")
    assert bad.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="answers are not stored"):
        client.responses.retrieve("resp_1")
