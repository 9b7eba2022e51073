"""openai-agents with its default model class, which speaks the Responses API."""

from __future__ import annotations

import asyncio

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
from agents.result import RunResultBase
from end_to_end.clients.question import MODEL, QUESTION, Topic, look_up

# Traces go to OpenAI.
set_tracing_disabled(True)

# The small model may not end a text by itself, and one that max_tokens cuts is an error of this library.
EIGHT_TOKENS = {"min_tokens": 8, "logit_bias": {"2": 100}}
# One for all checks, because the library keeps its connections.
LOOP = asyncio.Runner()


def agent(settings: dict[str, object] | None = None, **fields: object) -> Agent:
    short = ModelSettings(temperature=0, extra_body=EIGHT_TOKENS, **(settings or {}))
    return Agent(name="Helper", model=MODEL, model_settings=short, **fields)


def run(agent: Agent, conversation: object = QUESTION) -> RunResultBase:
    return LOOP.run(Runner.run(agent, conversation))


def stream(agent: Agent) -> tuple[list[str], RunResultBase]:
    """Return the deltas of the text, and the result."""

    async def deltas() -> tuple[list[str], RunResultBase]:
        result = Runner.run_streamed(agent, QUESTION)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in events if event.type == "response.output_text.delta"], result

    return LOOP.run(deltas())


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer() -> None:
    whole = run(agent())
    deltas, streamed = stream(agent())
    assert len(deltas) > 1
    assert "".join(deltas) == streamed.final_output == whole.final_output
    assert streamed.context_wrapper.usage.output_tokens == whole.context_wrapper.usage.output_tokens


def test_a_streamed_run_calls_a_named_tool_and_answers() -> None:
    settings = {"tool_choice": "look_up", "parallel_tool_calls": False}
    _, result = stream(agent(settings, tools=[function_tool(look_up)]))
    _assert_called_then_answered(result)


def test_a_required_tool_precedes_an_output_type() -> None:
    settings = {"tool_choice": "required", "parallel_tool_calls": False}
    result = run(agent(settings, tools=[function_tool(look_up)], output_type=Topic))
    _assert_called_then_answered(result)
    assert isinstance(result.final_output, Topic)


def _assert_called_then_answered(result: RunResultBase) -> None:
    call, output, answer = (item.type for item in result.new_items)
    assert (call, output, answer) == ("tool_call_item", "tool_call_output_item", "message_output_item")
    assert result.new_items[1].output in ("found list", "found dict")
    assert result.context_wrapper.usage.requests == 2
