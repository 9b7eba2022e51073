"""`return_token_ids` and `/render`: the ids of prompt and completion, at vLLM's places."""

from __future__ import annotations

import pytest
from frontend.endpoints import Endpoint, Json, check_refusal
from frontend.fake_triton import FakeTriton
from frontend.model_responses import FIRST_ID

IDS = [FIRST_ID + number for number in range(4)]


def test_a_completion_has_the_ids_of_prompt_and_text_in_each_choice(served: Endpoint) -> None:
    choices = served.complete(prompt=["Return a list", "Set"], n=2, return_token_ids=True).json()["choices"]
    assert [choice["token_ids"] for choice in choices] == [IDS] * 4
    prompts = [served.tokens(prompt) for prompt in ("Return a list", "Set")]
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
    assert answer["prompt_token_ids"] == served.tokens(text.removeprefix("<s>"))


@pytest.mark.parametrize("stream", [False, True])
def test_without_the_field_there_are_no_ids(served: Endpoint, stream: bool) -> None:
    assert "token_ids" not in served.complete(stream=stream).text + served.chat(stream=stream).text


TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {}}}


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"truncate_prompt_tokens": 5}])
def test_a_rendered_chat_has_the_ids_of_its_prompt(served: Endpoint, triton: FakeTriton, fields: Json) -> None:
    body: Json = {"messages": [{"role": "user", "content": "What is a list? </s>"}], **fields}
    rendered = served.http.post("/v1/chat/completions/render", json=body).json()
    assert triton.requests == []
    expected = served.chat(return_token_ids=True, **body).json()["prompt_token_ids"]
    assert rendered == {"model": "pydoc-llama", "token_ids": expected}


def test_a_rendered_completion_has_the_ids_of_each_prompt(served: Endpoint, triton: FakeTriton) -> None:
    rendered = served.http.post("/v1/completions/render", json={"prompt": ["Return a list", "Set"], "n": 2}).json()
    assert triton.requests == []
    expected = [served.tokens("Return a list"), served.tokens("Set")]
    assert rendered == [{"model": "pydoc-llama", "token_ids": ids} for ids in expected]


def test_what_a_chat_would_refuse_is_not_rendered(served: Endpoint) -> None:
    refused = served.http.post("/v1/chat/completions/render", json={"messages": [], "tool_choice": "auto"})
    check_refusal(refused, "messages", "it must have at least 1 item")
