"""The contract's strings: the prompt and its length, UTF-8 everywhere, stop words and bad words."""

from dataclasses import dataclass

import pytest
from engine.contract import MAX_MODEL_LEN, parse_one, parser, raw
from llama_engine.api.defaults import GenerationDefaults
from llama_engine.api.request_parser import MAX_BAD_WORDS, MAX_STOP_WORDS
from llama_engine.errors import InvalidRequest
from llama_engine.text.tokenizer import Tokenizer

LIMIT = MAX_MODEL_LEN - 1


def _prompt_of(tokens: int, tokenizer: Tokenizer) -> str:
    return next(text for count in range(1000) if len(tokenizer.encode(text := "def" + " x" * count)) == tokens)


@dataclass(frozen=True)
class _NeverAsked(Tokenizer):
    """A tokenizer that must not get to see a prompt."""

    def encode(self, text: str) -> tuple[int, ...]:
        raise AssertionError(f"{len(text)} characters were tokenized")


def test_the_prompt_is_not_what_was_sent(tokenizer: Tokenizer) -> None:
    request = parse_one(tokenizer, text_input="Grüße 🙂\n")
    assert request.prompt == "Grüße 🙂\n"
    assert request.prompt_tokens == tuple(tokenizer.pretrained("Grüße 🙂\n")["input_ids"])
    assert request.prompt_tokens[0] == tokenizer.pretrained.bos_token_id


def test_a_missing_prompt_is_not_named() -> None:
    with pytest.raises(InvalidRequest, match=r"^text_input is missing: it is the one input without a default$"):
        parser(Tokenizer(None, None)).parse({})  # type: ignore[arg-type]  # neither is looked at


def test_an_empty_prompt_is_accepted(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^text_input is ''; it must be a text of at least one token$"):
        parse_one(tokenizer, text_input="")


def test_a_prompt_of_spaces_is_refused(tokenizer: Tokenizer) -> None:
    assert parse_one(tokenizer, text_input=" ").prompt == " "


def test_the_longest_prompt_is_refused_or_one_token_more_is_accepted(tokenizer: Tokenizer) -> None:
    request = parse_one(tokenizer, text_input=_prompt_of(LIMIT, tokenizer))
    assert len(request.prompt_tokens) == LIMIT
    with pytest.raises(InvalidRequest) as refused:
        parse_one(tokenizer, text_input=_prompt_of(LIMIT + 1, tokenizer))
    assert (
        str(refused.value) == f"text_input is {LIMIT + 1} tokens; it must be at most {LIMIT} tokens (max_model_len - 1)"
    )


def test_a_default_max_tokens_does_not_shrink_to_what_fits(tokenizer: Tokenizer) -> None:
    for length in (LIMIT, LIMIT - 1, LIMIT - 20):
        request = parse_one(tokenizer, text_input=_prompt_of(length, tokenizer))
        assert request.max_tokens == min(16, MAX_MODEL_LEN - length)
        assert request.min_tokens == min(2, request.max_tokens)


def test_a_huge_prompt_is_tokenized_before_it_is_refused(tokenizer: Tokenizer) -> None:
    unasked = _NeverAsked(tokenizer.pretrained, tokenizer.vocabulary)
    size = LIMIT * tokenizer.vocabulary.longest + 1
    with pytest.raises(
        InvalidRequest, match=f"^text_input is a text of {size} bytes; it must be at most {LIMIT} tokens"
    ):
        parser(unasked, GenerationDefaults(max_tokens=1)).parse(raw(text_input="x" * size))


def test_a_prompt_of_the_longest_tokens_is_taken_for_a_huge_one(tokenizer: Tokenizer) -> None:
    longest = max(tokenizer.vocabulary.token_bytes, key=len).decode()
    tokens_each = len(tokenizer.encode(longest)) - 1
    count = (LIMIT - 1) // tokens_each
    assert parse_one(tokenizer, text_input=longest * count).prompt == longest * count


@pytest.mark.parametrize("broken", [b"\xff", b"ok \xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
@pytest.mark.parametrize("name", ["text_input", "stop_words", "bad_words"])
def test_bytes_that_are_not_utf8_are_accepted(tokenizer: Tokenizer, name: str, broken: bytes) -> None:
    offset = 3 if broken.startswith(b"ok") else 0
    with pytest.raises(InvalidRequest) as refused:
        parse_one(tokenizer, **{name: broken})
    assert str(refused.value) == (
        f"{name} is not UTF-8 (byte 0x{broken[offset]:02x} at offset {offset}); it must be UTF-8 text"
    )


@pytest.mark.parametrize(("name", "limit"), [("stop_words", 16), ("bad_words", 64)])
def test_the_longest_list_is_refused_or_one_word_more_is_accepted(tokenizer: Tokenizer, name: str, limit: int) -> None:
    assert (MAX_STOP_WORDS, MAX_BAD_WORDS) == (16, 64)
    words = [f"w{index}" for index in range(limit)]
    padded = [*words, "", ""]
    assert getattr(parse_one(tokenizer, **{name: padded}), name) == tuple(word.encode() for word in words)
    with pytest.raises(InvalidRequest) as refused:
        parse_one(tokenizer, **{name: [*words, "one more"]})
    assert str(refused.value) == f"{name} is a list of {limit + 1} words; it must be at most {limit} words"


@pytest.mark.parametrize("name", ["stop_words", "bad_words"])
def test_an_empty_word_counts_as_a_word(tokenizer: Tokenizer, name: str) -> None:
    assert getattr(parse_one(tokenizer, **{name: [""]}), name) == ()
    assert getattr(parse_one(tokenizer, **{name: ["", "é ", ""]}), name) == ("é ".encode(),)


@pytest.mark.parametrize("name", ["stop_words", "bad_words"])
def test_the_longest_word_is_refused_or_one_byte_more_is_accepted(tokenizer: Tokenizer, name: str) -> None:
    longest = "é" * 512
    assert getattr(parse_one(tokenizer, **{name: ["a", longest]}), name) == (b"a", longest.encode())
    with pytest.raises(InvalidRequest) as refused:
        parse_one(tokenizer, **{name: ["a", longest + "."]})
    assert (
        str(refused.value) == f"{name} is a list with a word of 1025 bytes; it must be of words of at most 1024 bytes"
    )
