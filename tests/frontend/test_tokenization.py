"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import pytest
from frontend.descriptions import EMBEDDED
from frontend.endpoints import Endpoint, error_of
from transformers import AutoTokenizer


@pytest.mark.parametrize("text", ["Return a list of", "Grüße 👋", "", "<s>a</s>"])
@pytest.mark.parametrize("special", [True, False])
def test_tokens_are_those_of_the_tokenizer(served: Endpoint, text: str, special: bool) -> None:
    answer = served.http.post("/tokenize", json={"prompt": text, "add_special_tokens": special}).json()
    expected = AutoTokenizer.from_pretrained(EMBEDDED)(text, add_special_tokens=special)["input_ids"]
    assert answer["tokens"] == expected
    assert (answer["count"], answer["token_strs"]) == (len(expected), None)
    assert answer["max_model_len"] == 2048
    back = served.http.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert back == ("<s>" if special else "") + text


def test_the_tokenizer_is_described_as_vllm_does(served: Endpoint) -> None:
    info = served.http.get("/tokenizer_info").json()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    assert (info["bos_token"], info["eos_token"]) == (tokenizer.bos_token, tokenizer.eos_token)
    assert info["chat_template"] == tokenizer.chat_template
    assert info["max_model_len"] == 2048
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert error_of(served.http.get("/tokenizer_info?model=other"))["param"] == "model"


def test_a_conversation_is_tokenized_as_its_prompt(served: Endpoint) -> None:
    messages = [{"role": "user", "content": "a"}]
    answer = served.http.post("/tokenize", json={"messages": messages, "return_token_strs": True}).json()
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert answer["tokens"] == tokenizer(str(prompt), add_special_tokens=False)["input_ids"]
    assert answer["token_strs"][0] == "<s>"


def test_a_final_message_that_is_continued_is_tokenized_open(served: Endpoint) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Yes, "}]
    body = {"messages": messages, "continue_final_message": True}
    tokens = served.http.post("/tokenize", json=body).json()["tokens"]
    text = served.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text == "<s>[INST] a [/INST] Yes, "
