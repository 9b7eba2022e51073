"""Tokens of prompts: vLLM's paths for them, `return_token_ids`, `/render` and `truncate_prompt_tokens`."""

from __future__ import annotations

import pytest
from frontend.descriptions import CONTEXT, EMBEDDED
from frontend.endpoints import Endpoint, Json, error_of, text_of
from frontend.fake_triton import FakeTriton
from frontend.model_messages import FIRST_ID
from transformers import PreTrainedTokenizerFast

TOOL: Json = {"type": "function", "function": {"name": "f", "parameters": {}}}
TEXT = "Return a list of all names"
LONG = {"role": "user", "content": "word " * 2000}
IDS = [FIRST_ID + number for number in range(4)]


@pytest.mark.parametrize(("text", "special"), [("Grüße 👋", True), ("", True), ("<s>a</s>", False)])
def test_tokens_are_those_of_the_tokenizer(served: Endpoint, text: str, special: bool) -> None:
    answer = served.post("/tokenize", prompt=text, add_special_tokens=special).json()
    expected = PreTrainedTokenizerFast.from_pretrained(EMBEDDED)(text, add_special_tokens=special)["input_ids"]
    assert answer["tokens"] == expected
    assert (answer["count"], answer["token_strs"]) == (len(expected), None)
    assert answer["max_model_len"] == 2048
    assert served.detokenize(expected) == ("<s>" if special else "") + text


def test_the_tokenizer_is_described_as_vllm_does(served: Endpoint) -> None:
    info = served.http.get("/tokenizer_info").json()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED)
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert info["chat_template"] == tokenizer.chat_template
    assert info["max_model_len"] == 2048
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert error_of(served.http.get("/tokenizer_info?model=other"))["param"] == "model"


def test_a_conversation_is_tokenized_as_its_prompt(served: Endpoint) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Yes, "}]
    body = {"messages": messages, "continue_final_message": True}
    answer = served.post("/tokenize", **body, return_token_strs=True).json()
    assert answer["token_strs"][0] == "<s>"
    assert served.detokenize(answer["tokens"]) == "<s>[INST] a [/INST] Yes, "


def test_a_completion_has_the_ids_of_prompt_and_text_in_each_choice(served: Endpoint) -> None:
    answer = served.complete(prompt=["Return a list", "Set"], n=2, echo=True, return_token_ids=True).json()
    choices = answer["choices"]
    # An echoed prompt has no ids among the text's.
    assert [choice["token_ids"] for choice in choices] == [IDS] * 4
    assert choices[0]["text"] == "Return a list Hello, world."
    prompts = [served.tokens(prompt) for prompt in ("Return a list", "Set")]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0], prompts[0], prompts[1], prompts[1]]


def test_a_chat_has_the_prompts_ids_beside_its_choices(served: Endpoint, triton: FakeTriton) -> None:
    answer = served.chat(n=2, return_token_ids=True).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [IDS] * 2
    # The template's own BOS is the only one.
    assert triton.prompt.startswith("<s>")
    assert answer["prompt_token_ids"] == served.tokens(triton.prompt.removeprefix("<s>"))


@pytest.mark.parametrize("fields", [{"tools": [TOOL]}, {"truncate_prompt_tokens": 5}])
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
    assert triton.prompt == TEXT
    served.complete(prompt=TEXT, truncate_prompt_tokens=count - 1)
    assert triton.last.inputs["input_ids"] == served.tokens(TEXT)[1:]


def test_every_prompt_of_a_list_is_truncated_by_itself(served: Endpoint, triton: FakeTriton) -> None:
    answer = served.complete(prompt=[[1, 2, 3, 4], [5]], truncate_prompt_tokens=2, return_token_ids=True).json()
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [[3, 4], [5]]
    assert sorted(request.inputs["input_ids"] for request in triton.requests) == [[3, 4], [5]]


def test_an_echo_is_what_is_left_of_the_prompt(served: Endpoint) -> None:
    last = served.tokens(TEXT)[-2:]
    answer = served.complete(prompt=TEXT, truncate_prompt_tokens=2, echo=True)
    assert text_of(answer) == f"{served.detokenize(last)} Hello, world."


@pytest.mark.parametrize(
    ("max_tokens", "left"),
    [(None, CONTEXT - 16), (0, CONTEXT - 1), (12, CONTEXT - 12), (CONTEXT, CONTEXT - 1)],
)
def test_truncation_to_minus_one_leaves_room_for_max_tokens(
    served: Endpoint, triton: FakeTriton, max_tokens: int | None, left: int
) -> None:
    served.complete(prompt=[1] * 5000, truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert len(triton.last.inputs["input_ids"]) == left


def test_a_long_conversation_becomes_its_last_tokens(served: Endpoint, triton: FakeTriton) -> None:
    last = served.tokenize(messages=[LONG])[-100:]
    answer = served.chat(messages=[LONG], truncate_prompt_tokens=100, return_token_ids=True).json()
    assert triton.last.inputs["input_ids"] == answer["prompt_token_ids"] == last
