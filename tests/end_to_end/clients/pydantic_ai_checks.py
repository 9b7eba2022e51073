"""pydantic-ai's `openai:` models, which speak the Responses API."""

from __future__ import annotations

import asyncio

import pytest
from end_to_end.clients import question
from end_to_end.clients.question import QUESTION, Topic
from pydantic_ai import Agent, AgentRunResult, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart, ToolReturnPart, UserPromptPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.tools import ToolDefinition
from pydantic_ai.usage import RunUsage

MODEL = f"openai:{question.MODEL}"


def agent(**fields: object) -> Agent:
    return Agent(MODEL, retries=0, **fields)


def run(agent: Agent) -> AgentRunResult:
    return agent.run_sync(QUESTION, model_settings={"temperature": 0, "max_tokens": 6})


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer() -> None:
    whole = run(agent())

    async def stream() -> tuple[list[str], RunUsage]:
        async with agent().run_stream(QUESTION, model_settings={"temperature": 0, "max_tokens": 6}) as streamed:
            return [text async for text in streamed.stream_text(delta=True, debounce_by=None)], streamed.usage

    deltas, usage = asyncio.run(stream())
    assert len(deltas) > 1
    assert "".join(deltas) == whole.output
    assert usage.output_tokens == 6


@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_a_streamed_output_is_a_pydantic_model(form: type[ToolOutput] | type[NativeOutput]) -> None:
    async def stream() -> object:
        settings = {"temperature": 0, "parallel_tool_calls": False}
        async with agent(output_type=form(Topic)).run_stream(QUESTION, model_settings=settings) as streamed:
            return await streamed.get_output()

    assert isinstance(asyncio.run(stream()), Topic)


def test_a_required_tool_is_called_and_its_result_answered() -> None:
    # An agent's own setting can't require a tool at the first step alone.
    tool = ToolDefinition(name="look_up", parameters_json_schema=Topic.model_json_schema())
    tools = ModelRequestParameters(function_tools=[tool])
    question = ModelRequest(parts=[UserPromptPart(QUESTION)])
    settings = {"temperature": 0, "tool_choice": "required", "parallel_tool_calls": False}
    called = model_request_sync(MODEL, [question], model_settings=settings, model_request_parameters=tools)
    (call,) = called.parts
    assert isinstance(call, ToolCallPart)
    Topic.model_validate(call.args_as_dict())
    result = ModelRequest(parts=[ToolReturnPart(call.tool_name, "found", tool_call_id=call.tool_call_id)])
    answer = model_request_sync(
        MODEL,
        [question, called, result],
        model_settings={"temperature": 0, "tool_choice": "none", "max_tokens": 8},
        model_request_parameters=tools,
    )
    assert [part.part_kind for part in answer.parts] == ["text"]
