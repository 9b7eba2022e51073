"""/v1/completions without a stream."""

from __future__ import annotations

import pytest
from frontend.descriptions import CONTEXT
from frontend.endpoints import Endpoint
from frontend.fake_triton import FakeTriton


def test_a_completion_is_answered_in_openais_form(served: Endpoint, triton: FakeTriton) -> None:
    answer = served.complete().json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    (choice,) = answer["choices"]
    assert choice == {
        "index": 0,
        "text": " Hello, world.",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_logprobs": None,
    }
    assert answer["usage"]["prompt_tokens"] == 3
    assert "timings" not in answer
    assert triton.prompt == "Return a list"


def test_every_prompt_of_a_list_is_answered_in_order(served: Endpoint, triton: FakeTriton) -> None:
    triton.text = lambda request: [f"{request.value('text_input')}!"]
    answer = served.complete(prompt=["a", "b c", "d"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a!", "a!", "b c!", "b c!", "d!", "d!"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert answer["usage"]["prompt_tokens"] == 4
    assert answer["usage"]["completion_tokens"] == 6


def test_echo_with_logprobs_has_the_prompts_too(served: Endpoint, triton: FakeTriton) -> None:
    """What lm-evaluation-harness reads: the first token has no probability, all others have."""
    (choice,) = served.complete(echo=True, logprobs=1, max_tokens=1).json()["choices"]
    assert choice["prompt_logprobs"] is None
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["Return", " a", " list", " Hello"]
    assert logprobs["text_offset"] == [0, 6, 8, 13]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {" a": -0.5}
    assert triton.last.value("prompt_logprobs") == 1


def test_a_completion_has_at_most_16_tokens_unless_it_sets_a_maximum(served: Endpoint, triton: FakeTriton) -> None:
    triton.tokens = ["a"] * 20
    usage = [served.complete(max_tokens=maximum).json()["usage"] for maximum in (None, 18)]
    assert [counts["completion_tokens"] for counts in usage] == [16, 18]
    assert served.complete(prompt=[1] * (CONTEXT - 3)).json()["usage"]["completion_tokens"] == 3


def test_max_tokens_0_with_echo_scores_the_prompt(served: Endpoint) -> None:
    fields = {"echo": True, "logprobs": 0, "max_tokens": 0, "n": 2, "return_token_ids": True}
    answer = served.complete(**fields).json()
    choice = answer["choices"][1]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("Return a list", "length", [])
    assert choice["logprobs"]["tokens"] == ["Return", " a", " list"]
    assert answer["usage"]["completion_tokens"] == 0


def test_a_completions_tokens_are_named_by_id_on_request(served: Endpoint) -> None:
    fields = {"prompt": [5, 9, 7], "echo": True, "logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = served.complete(**fields).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:5", *["token_id:0"] * 6]


@pytest.mark.parametrize("stream", [False, True])
def test_one_prompts_error_is_the_requests(served: Endpoint, triton: FakeTriton, stream: bool) -> None:
    triton.text = lambda request: [" fine"] if request.prompt_tokens == 1 else _fail()
    response = served.complete(prompt=["a", "b c"], stream=stream)
    # The other prompt's text may come before it.
    assert response.status_code == 500 or stream
    assert "a fault of the fake" in response.text
    assert "[DONE]" not in response.text


def _fail() -> list[str]:
    raise ValueError("a fault of the fake")
