"""A completion's log probabilities: names of tokens, and offsets in the text, which tokens needn't respect."""

from __future__ import annotations

from typing import Any

import pytest
from triton_llama.completion import TokenLogprobs
from triton_llama_openai.output.logprobs import CompletionLogprobs, logprobs_content


def _position(*tokens: bytes, name: str = "") -> TokenLogprobs:
    """Return a token and its alternatives, each less likely, as the engine writes them. name: of a special token."""
    return {
        str(number): {
            "logprob": -1.0 - number,
            "decoded_token": (text := token.decode(errors="replace") or name),
            **({} if text.encode() == token else {"bytes": list(token)}),
        }
        for number, token in enumerate(tokens)
    }


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        (["你".encode()[:2], "你".encode()[2:], "好吗".encode(), b" end"], [0, 0, 1, 3]),
        # Text that is not UTF-8 has U+FFFD.
        ([b"a", b"\xe4\xbd", b"b", b"\xff", b"c"], [0, 1, 2, 3, 4]),
    ],
    ids=["ends within a character", "a character that is cut off"],
)
def test_an_offset_is_the_character_in_which_the_token_begins(tokens: list[bytes], offsets: list[int]) -> None:
    assert CompletionLogprobs().add(map(_position, tokens))["text_offset"] == offsets


def test_a_special_token_has_a_name_but_no_place_in_the_text() -> None:
    lists = CompletionLogprobs().add([_position(b"a"), _position(b"", name="</s>"), _position(b"b")])
    assert (lists["tokens"], lists["text_offset"]) == (["a", "</s>", "b"], [0, 1, 1])


def test_part_of_a_character_is_named_by_its_bytes() -> None:
    lists = CompletionLogprobs().add([_position(b"\xe4\xbd", b"\xe4\xb8")])
    assert lists["tokens"] == ["bytes:\\xe4\\xbd"]
    assert lists["top_logprobs"] == [{"bytes:\\xe4\\xbd": -1.0, "bytes:\\xe4\\xb8": -2.0}]


def test_a_repeated_text_is_named_by_its_id() -> None:
    lists = CompletionLogprobs().add([_position(b"a", b"a")])
    assert lists["top_logprobs"] == [{"a": -1.0, "token_id:1": -2.0}]


@pytest.mark.parametrize(
    ("text", "tokens", "expected"),
    [
        ("The capital is", [b" capital", b" is"], (["The", " capital", " is"], [0, 3, 11])),
        ("The capital", [b" The", b" capital"], (["", "The", " capital"], [0, 0, 3])),
        ("你 a", [b"\xa0", b" a"], (["bytes:\\xe4\\xbd", "bytes:\\xa0", " a"], [0, 0, 1])),
        ("Hello", [], (["Hello"], [0])),
    ],
    ids=["no BOS", "BOS and a space", "the first token ends within a character", "one token"],
)
def test_the_tokens_of_an_echoed_prompt_are_its_text(text: str, tokens: list[bytes], expected: object) -> None:
    lists = CompletionLogprobs().add_prompt(text, [None, *map(_position, tokens)], None)
    assert (lists["tokens"], lists["text_offset"]) == expected


def test_the_bytes_of_a_chats_tokens_are_those_of_its_text() -> None:
    parts = [_position("😀".encode()[:3]), _position("😀".encode()[3:] + b"a"), _position(b"", name="</s>")]
    content: list[Any] = logprobs_content(parts, 0)
    assert [token["token"] for token in content] == ["\ufffd", "\ufffda", "</s>"]
    assert b"".join(bytes(token["bytes"]) for token in content) == "😀a".encode()
