"""`return_token_ids`: the ids of prompt and completion, at vLLM's places."""

from __future__ import annotations

from itertools import chain

import pytest
from frontend.endpoints import Endpoint, Json, events_of
from frontend.fake_triton import FIRST_ID, FakeTriton

IDS = [FIRST_ID + number for number in range(4)]


def _tokens(served: Endpoint, prompt: str) -> list[int]:
    return list(served.http.post("/tokenize", json={"prompt": prompt}).json()["tokens"])


def _choices(events: list[Json], index: int = 0) -> list[Json]:
    listed = chain.from_iterable(event["choices"] for event in events if isinstance(event["choices"], list))
    return [choice for choice in listed if choice["index"] == index]


def _ids(choices: list[Json]) -> list[int]:
    return [token for choice in choices for token in choice.get("token_ids", [])]  # type: ignore[attr-defined]


def test_a_completion_has_the_ids_of_prompt_and_text_in_each_choice(served: Endpoint) -> None:
    choices = served.complete(prompt=["Return a list", "Set"], n=2, return_token_ids=True).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [IDS] * 4
    prompts = [_tokens(served, prompt) for prompt in ("Return a list", "Set")]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0], prompts[0], prompts[1], prompts[1]]


def test_a_prompt_of_tokens_is_returned_as_it_is(served: Endpoint) -> None:
    choices = served.complete(prompt=[[1, 5, 9], [3]], return_token_ids=True).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[1, 5, 9], [3]]


def test_an_echoed_prompt_has_no_ids_among_the_texts(served: Endpoint) -> None:
    (choice,) = served.complete(echo=True, return_token_ids=True).json()["choices"]
    assert (choice["text"], choice["token_ids"]) == ("Return a list Hello, world.", IDS)


def test_a_chat_has_the_prompts_ids_beside_its_choices(served: Endpoint, triton: FakeTriton) -> None:
    answer = served.chat(n=2, return_token_ids=True).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [IDS] * 2
    # The template's own BOS is the only one.
    text = str(triton.last.value("text_input"))
    assert text.startswith("<s>")
    assert answer["prompt_token_ids"] == _tokens(served, text.removeprefix("<s>"))


@pytest.mark.parametrize("echo", [False, True])
def test_the_first_event_of_each_choice_has_the_prompts_ids(served: Endpoint, echo: bool) -> None:
    events = events_of(served.complete(n=2, stream=True, echo=echo, return_token_ids=True))
    for index in (0, 1):
        first, *others = _choices(events, index)
        assert first["prompt_token_ids"] == _tokens(served, "Return a list")
        assert all("prompt_token_ids" not in choice for choice in others)
        assert _ids([first, *others]) == IDS


def test_a_streamed_chat_has_the_prompts_ids_beside_its_first_choice(served: Endpoint) -> None:
    first, *others = events_of(served.chat(stream=True, return_token_ids=True))
    assert first["prompt_token_ids"]
    assert all("prompt_token_ids" not in event for event in others)
    assert _ids(_choices([first, *others])) == IDS


def test_tokens_whose_text_is_held_back_come_with_the_next_event(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["<tool_call>", '{"name": "f", ', '"arguments": {}}', "</tool_call>"]
    tools = [{"type": "function", "function": {"name": "f"}}]
    events = events_of(served.chat(stream=True, tools=tools, return_token_ids=True))
    choices = _choices(events)
    assert any("tool_calls" in str(choice["delta"]) for choice in choices)
    assert _ids(choices) == IDS


@pytest.mark.parametrize("stream", [False, True])
def test_without_the_field_there_are_no_ids(served: Endpoint, stream: bool) -> None:
    assert "token_ids" not in served.complete(stream=stream).text + served.chat(stream=stream).text
