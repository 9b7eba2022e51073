"""The events of a streamed response."""

from __future__ import annotations

import pytest
from frontend.endpoints import Endpoint, Json
from frontend.fake_triton import FakeTriton
from frontend.openai_types import read_events
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseCreatedEvent,
    ResponseFailedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseIncompleteEvent,
    ResponseInProgressEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseReasoningTextDeltaEvent,
    ResponseStreamEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)

ADD: Json = {"type": "function", "name": "add"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BEGIN = ["created", "in_progress"]
PART = ["output_item.added", "content_part.added"]
PART_DONE = ["content_part.done", "output_item.done"]
CALL_EVENTS = [
    "output_item.added",
    "function_call_arguments.delta",
    "function_call_arguments.done",
    "output_item.done",
]


def _names(events: list[ResponseStreamEvent]) -> list[str]:
    return [event.type.removeprefix("response.") for event in events]


def _last(events: list[ResponseStreamEvent]) -> Response:
    """Return the response that the last event has; all others with one have the same id."""
    lifecycle = ResponseCreatedEvent | ResponseInProgressEvent
    end = events[-1]
    assert isinstance(end, ResponseCompletedEvent | ResponseIncompleteEvent | ResponseFailedEvent)
    assert {event.response.id for event in events if isinstance(event, lifecycle)} == {end.response.id}
    return end.response


def _comparable(response: Response) -> list[Json]:
    """Return the output without its random ids."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


def test_a_text_is_an_item_with_a_part(served: Endpoint) -> None:
    events = read_events(served.respond(stream=True))
    text = [*PART, *["output_text.delta"] * 4, "output_text.done", *PART_DONE]
    assert _names(events) == [*BEGIN, *text, "completed"]
    deltas = [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]
    assert deltas == [" Hello", ",", " world", "."]
    assert [event.text for event in events if isinstance(event, ResponseTextDoneEvent)] == [" Hello, world."]


def test_a_call_is_an_item_with_its_arguments(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", *CALL, "\n", CALL]
    events = read_events(served.respond(stream=True, tools=[ADD]))
    text = [*PART, "output_text.delta", "output_text.done", *PART_DONE]
    assert _names(events) == [*BEGIN, *text, *CALL_EVENTS, *CALL_EVENTS, "completed"]
    deltas = [event for event in events if isinstance(event, ResponseFunctionCallArgumentsDeltaEvent)]
    assert [(event.output_index, event.delta) for event in deltas] == [(1, '{"a": 1}'), (2, '{"a": 1}')]


def test_an_item_that_is_done_is_the_one_of_the_last_event(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", CALL, "Done."]
    events = read_events(served.respond(stream=True, tools=[ADD]))
    done = [event.item for event in events if isinstance(event, ResponseOutputItemDoneEvent)]
    assert done == _last(events).output
    added = [event.item for event in events if isinstance(event, ResponseOutputItemAddedEvent)]
    assert [item.id for item in added] == [item.id for item in done]
    assert [item.model_dump().get("status") for item in added] == ["in_progress"] * 3


def test_reasoning_is_an_item_of_its_own(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<th", "ink>\nA", " sum.\n</th", "ink>\n\n4"]
    events = read_events(qwen3.respond(stream=True, include=["message.output_text.logprobs"]))
    reasoning = [*PART, *["reasoning_text.delta"] * 2, "reasoning_text.done", *PART_DONE]
    text = [*PART, "output_text.delta", "output_text.done", *PART_DONE]
    assert _names(events) == [*BEGIN, *reasoning, *text, "completed"]
    deltas = [event.delta for event in events if isinstance(event, ResponseReasoningTextDeltaEvent)]
    assert deltas == ["A", " sum."]
    (text_delta,) = [event for event in events if isinstance(event, ResponseTextDeltaEvent)]
    assert [entry.token for entry in text_delta.logprobs] == triton.tokens


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        ([" Hello", ", world."], {}),
        ([" Hello", ", world."], {"max_output_tokens": 1}),
        ([" Hello", ", world."], {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        (["I add. ", CALL, CALL[:20], CALL[20:], " Done", "."], {"tools": [ADD]}),
        ([CALL[:20], CALL[20:]], {"tools": [ADD], "max_output_tokens": 1}),
        (['{"a":', " 1}"], {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}),
        ([""], {}),
    ],
)
def test_the_last_event_has_the_answer_that_is_not_streamed(
    served: Endpoint, triton: FakeTriton, tokens: list[str], fields: Json
) -> None:
    triton.tokens = tokens
    streamed = _last(read_events(served.respond(stream=True, **fields)))
    whole = Response.model_validate(served.respond(**fields).json())
    assert _comparable(streamed) == _comparable(whole)
    assert (streamed.status, streamed.usage) == (whole.status, whole.usage)


def test_an_error_within_a_response_is_its_last_event(served: Endpoint, triton: FakeTriton) -> None:
    triton.failing = "INTERNAL: the server's log has the reason"
    triton.after_tokens = 2
    events = read_events(served.respond(stream=True))
    response = _last(events)
    assert (_names(events)[-1], response.status) == ("failed", "failed")
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", "the server's log has the reason")
    assert response.output_text == " Hello,"
    line = 'llama_openai_requests_total{code="500",route="/v1/responses"} 1.0'
    triton.wait_for(lambda _: line in served.http.get("/metrics").text)


def test_a_refusal_within_a_response_names_its_field(served: Endpoint, triton: FakeTriton) -> None:
    triton.failing = "INVALID_ARG: guided_decoding_guide_type, allowed_token_ids together allow no token after 1 tokens"
    triton.after_tokens = 1
    fields: Json = {"text": {"format": {"type": "json_object"}}, "allowed_token_ids": [5]}
    error = _last(read_events(served.respond(stream=True, **fields))).error
    assert error is not None
    assert error.code == "invalid_prompt"
    assert error.message == "text.format, allowed_token_ids together allow no token after 1 tokens"
