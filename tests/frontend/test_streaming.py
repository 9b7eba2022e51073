"""Streamed chats and completions: events, usage, errors within a stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import pytest
from frontend.endpoints import Endpoint, Json, endpoint, error_of, events_of
from frontend.fake_triton import FakeTriton
from httpx import Response


def _choices(events: list[Json]) -> list[dict[str, Any]]:
    """Return the choices of all events, in order."""
    choices: list[dict[str, Any]] = []
    for event in events:
        listed = event["choices"]
        assert isinstance(listed, list)
        choices += listed
    return choices


def test_a_streamed_chat_begins_with_the_role(served: Endpoint, triton: FakeTriton) -> None:
    events = events_of(served.chat(stream=True))
    choices = _choices(events)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"].get("content", "") for choice in choices) == " Hello, world."
    assert [choice["finish_reason"] for choice in choices] == [None] * 5 + ["stop"]
    assert choices[-1]["delta"] == {}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert (triton.last.value("stream"), triton.last.value("stream_interval_ms")) == (True, 20)
    assert all("usage" not in event for event in events)


def test_include_usage_makes_the_token_counts_the_last_event(served: Endpoint, triton: FakeTriton) -> None:
    triton.cached_tokens = 3
    *events, last = events_of(served.chat(stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": triton.last.prompt_tokens,
        "completion_tokens": 4,
        "total_tokens": triton.last.prompt_tokens + 4,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert all(event["usage"] is None for event in events)
    # The model is asked for outputs that are read alone.
    assert {"text_output", "finish_reason", "num_cached_tokens", "stop_reason"} < triton.last.outputs
    assert not triton.last.outputs & {"cum_log_probs", "output_log_probs"}


def test_continuous_usage_stats_puts_the_counts_on_every_event(served: Endpoint) -> None:
    events = events_of(served.chat(stream=True, stream_options={"continuous_usage_stats": True}))
    counted = [event["usage"] for event in events]
    assert [usage["completion_tokens"] for usage in counted if isinstance(usage, dict)] == [0, 1, 2, 3, 4, 4]
    options = {"include_usage": False, "continuous_usage_stats": True}
    assert "usage" not in served.complete(stream=True, stream_options=options).text


def _parts(choice: dict[str, Any]) -> dict[str, Any]:
    """Return what a choice, or the event of one, has of text and tokens, without random ids."""
    message = choice.get("message") or choice.get("delta") or {"content": choice.get("text")}
    logprobs = choice["logprobs"] or {}
    return {
        "text": message.get("content") or "",
        "calls": [call["function"] for call in message.get("tool_calls", [])],
        "tokens": logprobs.get("content", []) + logprobs.get("tokens", []),
        "offsets": logprobs.get("text_offset", []),
        "ids": choice.get("token_ids", []),
        "prompt ids": choice.get("prompt_token_ids", []),
    }


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED: Json = {"tools": TOOLS, "tool_choice": TOOLS[0]}
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
FORCED = '[{"name": "f", "parameters": {"a": 1}}, {"name": "f", "parameters": {"a": 2}}]'
TEXT = [" Hello", ",", " world", "."]


@pytest.mark.parametrize(
    ("ask", "tokens", "fields"),
    [
        (Endpoint.chat, TEXT, {"n": 2, "return_token_ids": True}),
        (Endpoint.chat, ["I call. ", CALL[:20], CALL[20:], CALL], {"tools": TOOLS, "return_token_ids": True}),
        (Endpoint.chat, [*FORCED], {"tools": TOOLS, "tool_choice": "required", "max_tokens": len(FORCED) - 3}),
        (Endpoint.chat, [*"123456789"], {**NAMED, "max_tokens": 3, "logprobs": True}),
        (Endpoint.chat, TEXT, {"stop": "wor", "logprobs": True, "top_logprobs": 1}),
        (Endpoint.complete, TEXT, {"prompt": ["a b", "c d e"], "n": 2, "echo": True, "return_token_ids": True}),
        (Endpoint.complete, TEXT, {"prompt": ["a b", "c d e"], "n": 2, "echo": True, "logprobs": 1}),
    ],
)
def test_the_events_of_a_choice_add_up_to_the_one_that_is_not_streamed(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response], tokens: list[str], fields: Json
) -> None:
    triton.tokens = tokens
    whole, events = ask(served, **fields).json(), events_of(ask(served, stream=True, **fields))
    for choice in whole["choices"]:
        own = [event for event in _choices(events) if event["index"] == choice["index"]]
        parts = [_parts(event) for event in own]
        assert _parts(choice) == {name: reduce(add, (part[name] for part in parts)) for name in parts[0]}
        for name in ("finish_reason", "stop_reason"):
            assert own[-1][name] == choice[name]
    assert events[0].get("prompt_token_ids") == whole.get("prompt_token_ids")


@pytest.mark.parametrize("ask", [Endpoint.chat, Endpoint.complete])
def test_an_error_within_a_stream_is_its_last_event(
    served: Endpoint, triton: FakeTriton, ask: Callable[..., Response]
) -> None:
    triton.failing = "INTERNAL: the request failed; the server's log has the reason"
    triton.after_tokens = 2
    response = ask(served, stream=True)
    assert response.status_code == 200
    last = response.text.strip().split("\n\n")[-1]
    assert last.startswith('data: {"error":{"message":"the request failed')
    assert "[DONE]" not in response.text


def test_an_answer_without_its_end_is_an_error(triton: FakeTriton) -> None:
    triton.end_early = True
    with endpoint(triton.port, resume_timeout=0) as served:
        whole, streamed = served.chat(), served.chat(stream=True)
    assert whole.status_code == 500
    assert error_of(whole)["type"] == "server_error"
    assert '{"error":' in streamed.text
    assert "[DONE]" not in streamed.text
