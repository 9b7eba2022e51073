"""The events of a streamed response."""

from __future__ import annotations

from typing import Any

import pytest
from frontend.client_types import read_response_events
from frontend.endpoints import Endpoint, Json, endpoint
from frontend.fake_triton import FakeTriton
from openai.types.responses import Response, ResponseStreamEvent

ADD: Json = {"type": "function", "name": "add"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
BEGIN, ENDS = ["created", "in_progress"], ["completed", "incomplete", "failed"]
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


def _of(events: list[ResponseStreamEvent], name: str) -> list[Any]:
    """Return the events of this name."""
    return [event for event in events if event.type == f"response.{name}"]


def _last(events: list[ResponseStreamEvent]) -> Response:
    """Return the response that the last event has; all others with one have the same id."""
    (response,) = [event.response for name in ENDS for event in _of(events, name)]
    assert {event.response.id for name in BEGIN for event in _of(events, name)} == {response.id}
    assert isinstance(response, Response)
    return response


def _comparable(response: Response) -> list[Json]:
    """Return the output without its random ids."""
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]


def test_a_text_is_an_item_with_a_part(served: Endpoint) -> None:
    events = read_response_events(served.respond(stream=True))
    text = [*PART, *["output_text.delta"] * 4, "output_text.done", *PART_DONE]
    assert _names(events) == [*BEGIN, *text, "completed"]
    deltas = [event.delta for event in _of(events, "output_text.delta")]
    assert deltas == [" Hello", ",", " world", "."]
    assert [event.text for event in _of(events, "output_text.done")] == [" Hello, world."]


def test_a_call_is_an_item_with_its_arguments(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", *CALL, "\n", CALL]
    events = read_response_events(served.respond(stream=True, tools=[ADD]))
    text = [*PART, "output_text.delta", "output_text.done", *PART_DONE]
    assert _names(events) == [*BEGIN, *text, *CALL_EVENTS, *CALL_EVENTS, "completed"]
    deltas = _of(events, "function_call_arguments.delta")
    assert [(event.output_index, event.delta) for event in deltas] == [(1, '{"a": 1}'), (2, '{"a": 1}')]


def test_an_item_that_is_done_is_the_one_of_the_last_event(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", CALL, "Done."]
    events = read_response_events(served.respond(stream=True, tools=[ADD]))
    done = [event.item for event in _of(events, "output_item.done")]
    assert done == _last(events).output
    added = [event.item for event in _of(events, "output_item.added")]
    assert [item.id for item in added] == [item.id for item in done]
    assert [item.model_dump().get("status") for item in added] == ["in_progress"] * 3


def test_reasoning_is_an_item_of_its_own(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<th", "ink>\nA", " sum.\n</th", "ink>\n\n4"]
    events = read_response_events(qwen3.respond(stream=True, include=["message.output_text.logprobs"]))
    reasoning = [*PART, *["reasoning_text.delta"] * 2, "reasoning_text.done", *PART_DONE]
    text = [*PART, "output_text.delta", "output_text.done", *PART_DONE]
    assert _names(events) == [*BEGIN, *reasoning, *text, "completed"]
    deltas = [event.delta for event in _of(events, "reasoning_text.delta")]
    assert deltas == ["A", " sum."]
    (text_delta,) = _of(events, "output_text.delta")
    assert [entry.token for entry in text_delta.logprobs] == triton.tokens


@pytest.mark.parametrize(
    ("tokens", "fields"),
    [
        ([" Hello", ", world."], {"max_output_tokens": 1}),
        ([" Hello", ", world."], {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
        (["I add. ", CALL, CALL[:20], CALL[20:], " Done", "."], {"tools": [ADD]}),
        (['{"a":', " 1}"], {"tools": [ADD], "tool_choice": {"type": "function", "name": "add"}}),
        ([""], {}),
    ],
)
def test_the_last_event_has_the_answer_that_is_not_streamed(
    served: Endpoint, triton: FakeTriton, tokens: list[str], fields: Json
) -> None:
    triton.tokens = tokens
    streamed = _last(read_response_events(served.respond(stream=True, **fields)))
    whole = Response.model_validate(served.respond(**fields).json())
    assert _comparable(streamed) == _comparable(whole)
    assert (streamed.status, streamed.usage) == (whole.status, whole.usage)


def test_an_error_within_a_response_is_its_last_event_and_counted(triton: FakeTriton) -> None:
    triton.failing, triton.after_tokens = "INTERNAL: the server's log has the reason", 2
    with endpoint(triton.port) as served:
        events = read_response_events(served.respond(stream=True))
        line = 'llama_openai_requests_total{code="500",route="/v1/responses"} 1.0'
        triton.wait_for(lambda _: line in served.http.get("/metrics").text)
    response = _last(events)
    assert (_names(events)[-1], response.status) == ("failed", "failed")
    assert response.error is not None
    assert (response.error.code, response.error.message) == ("server_error", "the server's log has the reason")
    assert response.output_text == " Hello,"


def test_a_refusal_within_a_response_names_its_field(served: Endpoint, triton: FakeTriton) -> None:
    triton.failing = "INVALID_ARG: guided_decoding_guide_type, allowed_token_ids together allow no token after 1 tokens"
    triton.after_tokens = 1
    fields: Json = {"text": {"format": {"type": "json_object"}}, "allowed_token_ids": [5]}
    error = _last(read_response_events(served.respond(stream=True, **fields))).error
    assert error is not None
    assert error.code == "invalid_prompt"
    assert error.message == "text.format, allowed_token_ids together allow no token after 1 tokens"
