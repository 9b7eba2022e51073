"""The events of a streamed message, and what anthropic's library makes of them."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import MessageParam, RawMessageStreamEvent, ToolParam
from frontend.client_types import read_message_events
from frontend.endpoints import HOST, Endpoint, Json, named_events
from frontend.fake_triton import FakeTriton

ADD: ToolParam = {"name": "add", "input_schema": {"type": "object"}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
QUESTION: list[MessageParam] = [{"role": "user", "content": "What is a list?"}]


@pytest.fixture
def client(served: Endpoint) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=f"http://{HOST}:{served.port}", api_key="unused", max_retries=0) as client:
        yield client


def _names(events: list[RawMessageStreamEvent]) -> list[str]:
    """Return each event's type; of a delta the delta's."""
    return [event.delta.type if event.type == "content_block_delta" else event.type for event in events]


def _block(*deltas: str) -> list[str]:
    return ["content_block_start", *deltas, "content_block_stop"]


def test_a_text_is_a_block_of_deltas(served: Endpoint, triton: FakeTriton) -> None:
    triton.cached_tokens = 2
    events = read_message_events(served.message(stream=True, max_tokens=3))
    assert _names(events) == ["message_start", *_block(*["text_delta"] * 3), "message_delta", "message_stop"]
    start, end = events[0], events[-2]
    assert start.type == "message_start"
    assert end.type == "message_delta"
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert (start.message.usage.input_tokens, start.message.usage.output_tokens) == (triton.last.prompt_tokens, 0)
    assert (end.delta.stop_reason, end.usage.output_tokens, end.usage.cache_read_input_tokens) == ("max_tokens", 3, 2)
    assert end.usage.input_tokens == triton.last.prompt_tokens - 2


def test_a_call_is_a_block_with_its_arguments(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["I add. ", *CALL, "\n", CALL]
    events = read_message_events(served.message(stream=True, tools=[ADD]))
    blocks = [*_block("text_delta"), *_block("input_json_delta") * 2]
    assert _names(events) == ["message_start", *blocks, "message_delta", "message_stop"]
    indices = [event.index for event in events if event.type == "content_block_stop"]
    assert indices == [0, 1, 2]


def test_thinking_is_a_block_that_ends_with_its_signature(qwen3: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<th", "ink>\nA", " sum.\n</th", "ink>\n\n4"]
    events = read_message_events(qwen3.message(stream=True))
    blocks = [*_block("thinking_delta", "thinking_delta", "signature_delta"), *_block("text_delta")]
    assert _names(events) == ["message_start", *blocks, "message_delta", "message_stop"]


@pytest.mark.parametrize("tokens", [["I add. ", CALL, " Done", "."], [CALL[:20], CALL[20:]], [""]])
def test_the_library_reads_the_same_message_streamed_or_not(
    client: anthropic.Anthropic, triton: FakeTriton, tokens: list[str]
) -> None:
    triton.tokens = tokens
    request: Json = {"model": "pydoc-llama", "max_tokens": 64, "messages": QUESTION, "tools": [ADD]}
    whole = client.messages.create(**request)  # type: ignore[call-overload]  # of any fields
    with client.messages.stream(**request) as stream:  # type: ignore[arg-type]  # of any fields
        streamed = stream.get_final_message()
    bodies = [message.model_dump(exclude={"id": True, "content": {"__all__": {"id"}}}) for message in (streamed, whole)]
    assert bodies[0] == bodies[1]


def test_an_error_within_a_stream_is_its_last_event(served: Endpoint, triton: FakeTriton) -> None:
    triton.failing, triton.after_tokens = "INTERNAL: the server's log has the reason", 2
    response = served.message(stream=True)
    error = {"type": "api_error", "message": "the server's log has the reason"}
    last = {"type": "error", "error": error, "request_id": response.headers["request-id"]}
    assert named_events(response)[-1] == last
