"""`truncate_prompt_tokens`: a long prompt's last tokens."""

from __future__ import annotations

import pytest
from frontend.descriptions import CONTEXT
from frontend.endpoints import Endpoint
from frontend.fake_triton import FakeTriton

TEXT = "Return a list of all names"
LONG = {"role": "user", "content": "word " * 2000}


def test_a_long_text_becomes_its_last_tokens_without_a_bos(served: Endpoint, triton: FakeTriton) -> None:
    answer = served.complete(prompt=TEXT, truncate_prompt_tokens=3, return_token_ids=True).json()
    last = served.tokens(TEXT)[-3:]
    assert triton.last.inputs["input_ids"] == last
    assert "text_input" not in triton.last.inputs
    assert answer["choices"][0]["prompt_token_ids"] == last
    assert answer["usage"]["prompt_tokens"] == 3


def test_a_prompt_within_the_bound_stays_as_it_is(served: Endpoint, triton: FakeTriton) -> None:
    count = len(served.tokens(TEXT))
    served.complete(prompt=TEXT, truncate_prompt_tokens=count)
    assert triton.last.value("text_input") == TEXT
    served.complete(prompt=TEXT, truncate_prompt_tokens=count - 1)
    assert triton.last.inputs["input_ids"] == served.tokens(TEXT)[1:]


def test_every_prompt_of_a_list_is_truncated_by_itself(served: Endpoint, triton: FakeTriton) -> None:
    served.complete(prompt=[[1, 2, 3, 4], [5]], truncate_prompt_tokens=2)
    assert sorted(request.inputs["input_ids"] for request in triton.requests) == [[3, 4], [5]]


def test_an_echo_is_what_is_left_of_the_prompt(served: Endpoint) -> None:
    last = served.tokens(TEXT)[-2:]
    left = served.http.post("/detokenize", json={"tokens": last}).json()["prompt"]
    (choice,) = served.complete(prompt=TEXT, truncate_prompt_tokens=2, echo=True).json()["choices"]
    assert choice["text"] == f"{left} Hello, world."


@pytest.mark.parametrize(
    ("max_tokens", "left"),
    [
        (None, CONTEXT - 16),
        (0, CONTEXT - 1),
        (12, CONTEXT - 12),
        (CONTEXT - 1, 1),
        (CONTEXT, CONTEXT - 1),
        (5000, CONTEXT - 1),
    ],
)
def test_minus_one_leaves_room_for_the_completion(
    served: Endpoint, triton: FakeTriton, max_tokens: int | None, left: int
) -> None:
    served.complete(prompt=[1] * 5000, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert len(triton.last.inputs["input_ids"]) == left


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_conversation_becomes_its_last_tokens(served: Endpoint, triton: FakeTriton, stream: bool) -> None:
    body = {"messages": [LONG]}
    tokens = served.http.post("/tokenize", json=body).json()["tokens"]
    response = served.chat(messages=[LONG], truncate_prompt_tokens=100, return_token_ids=True, stream=stream)
    assert response.status_code == 200
    assert triton.last.inputs["input_ids"] == tokens[-100:]
    assert f'"prompt_token_ids":{tokens[-100:]}'.replace(" ", "") in response.text
