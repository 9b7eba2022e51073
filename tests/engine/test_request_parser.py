"""The contract's inputs: both sides of every bound, defaults of missing inputs, UTF-8, prompts and lists of words."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from engine.contract import DEFAULTS, MAX_MODEL_LEN, parse_one, parser, raw
from llama_engine.api.defaults import GenerationDefaults
from llama_engine.api.request_parser import MAX_BAD_WORDS, MAX_STOP_WORDS
from llama_engine.errors import InvalidRequest
from llama_engine.text.tokenizer import Tokenizer

LONGEST_PROMPT = MAX_MODEL_LEN - 1
UP, DOWN = np.float32(np.inf), np.float32(-np.inf)
TWO, ONE, ZERO = np.float32(2), np.float32(1), np.float32(0)
TINY = np.nextafter(ZERO, UP)
LARGEST = np.finfo(np.float32).max

WITHIN: dict[str, tuple[float, ...]] = {
    "max_tokens": (2,),  # the default of min_tokens
    "min_tokens": (0, 16),
    "temperature": (0.0, float(TINY), 2.0),
    "top_k": (0, 1, 2**31 - 1),
    "top_p": (float(TINY), 1.0),
    "repetition_penalty": (float(TINY), float(LARGEST)),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "seed": (0, 2**63, 2**64 - 1),
}
POSITIVE_INTEGER = "a whole number, at least 1"
MIN_TOKENS = "a whole number, at least 0 and at most 16"
TEMPERATURE = "a finite number, at least 0 and at most 2"
TOP_P = "a finite number, greater than 0 and at most 1"
POSITIVE = "a finite number, greater than 0"
PENALTY = "a finite number, at least -2 and at most 2"
BEYOND: list[tuple[str, float | np.float32, str, str]] = [
    ("max_tokens", 0, "0", POSITIVE_INTEGER),
    ("max_tokens", -(2**31), "-2147483648", POSITIVE_INTEGER),
    ("min_tokens", -1, "-1", MIN_TOKENS),
    ("min_tokens", 17, "17", MIN_TOKENS),
    ("temperature", np.nextafter(ZERO, DOWN), "-1e-45", TEMPERATURE),
    ("temperature", np.nextafter(TWO, UP), "2.0000002", TEMPERATURE),
    ("top_k", -1, "-1", "a whole number, at least 0"),
    ("top_p", 0.0, "0.0", TOP_P),
    ("top_p", np.nextafter(ONE, UP), "1.0000001", TOP_P),
    ("repetition_penalty", 0.0, "0.0", POSITIVE),
    ("repetition_penalty", -1.0, "-1.0", POSITIVE),
    ("frequency_penalty", np.nextafter(TWO, UP), "2.0000002", PENALTY),
    ("frequency_penalty", np.nextafter(-TWO, DOWN), "-2.0000002", PENALTY),
    ("presence_penalty", np.nextafter(TWO, UP), "2.0000002", PENALTY),
    ("presence_penalty", np.nextafter(-TWO, DOWN), "-2.0000002", PENALTY),
    *(
        (name, value, str(value), bound)
        for name, bound in (
            ("temperature", TEMPERATURE),
            ("top_p", TOP_P),
            ("repetition_penalty", POSITIVE),
            ("frequency_penalty", PENALTY),
            ("presence_penalty", PENALTY),
        )
        for value in (math.nan, math.inf, -math.inf)
    ),
]

word_lists = pytest.mark.parametrize("name", ["stop_words", "bad_words"])


def refusal(tokenizer: Tokenizer, **values: object) -> str:
    with pytest.raises(InvalidRequest) as refused:
        parse_one(tokenizer, **values)
    return str(refused.value)


def prompt_of(tokens: int, tokenizer: Tokenizer) -> str:
    return next(text for count in range(1000) if len(tokenizer.encode(text := "def" + " x" * count)) == tokens)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WITHIN.items() for value in values])
def test_a_value_on_the_bound_is_accepted_unchanged(tokenizer: Tokenizer, name: str, value: float) -> None:
    parsed = getattr(parse_one(tokenizer, **{name: value}), name)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(("name", "value", "shown", "bound"), BEYOND)
def test_a_value_beyond_the_bound_is_refused_by_name_value_and_bound(
    tokenizer: Tokenizer, name: str, value: float | np.float32, shown: str, bound: str
) -> None:
    assert refusal(tokenizer, **{name: value}) == f"{name} is {shown}; it must be {bound}"


def test_max_tokens_beyond_the_room_left_is_refused(tokenizer: Tokenizer) -> None:
    prompt = len(tokenizer.encode("def f"))
    room = MAX_MODEL_LEN - prompt
    assert parse_one(tokenizer, max_tokens=room).max_tokens == room
    assert refusal(tokenizer, max_tokens=room + 1) == (
        f"max_tokens is {room + 1}; it must be at most {room}: the prompt has {prompt} tokens, "
        f"and prompt and completion together may have {MAX_MODEL_LEN}"
    )


def test_min_tokens_is_bounded_by_an_explicit_max_tokens(tokenizer: Tokenizer) -> None:
    assert parse_one(tokenizer, max_tokens=5, min_tokens=5).min_tokens == 5
    message = refusal(tokenizer, max_tokens=5, min_tokens=6)
    assert message == "min_tokens is 6; it must be a whole number, at least 0 and at most 5"


def test_defaults_are_capped_to_the_room_left_and_to_max_tokens(tokenizer: Tokenizer) -> None:
    assert parse_one(tokenizer, max_tokens=1).min_tokens == 1
    for length in (LONGEST_PROMPT, LONGEST_PROMPT - 1, LONGEST_PROMPT - 20):
        request = parse_one(tokenizer, text_input=prompt_of(length, tokenizer))
        assert request.max_tokens == min(16, MAX_MODEL_LEN - length)
        assert request.min_tokens == min(2, request.max_tokens)


def test_a_missing_input_gets_its_default(tokenizer: Tokenizer) -> None:
    request = parse_one(tokenizer)
    for name in ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty"):
        assert getattr(request, name) == getattr(DEFAULTS, name), name
    assert (request.frequency_penalty, request.presence_penalty) == (0.0, 0.0)
    assert (request.stop_words, request.bad_words, request.exclude_input_in_output) == ((), (), True)


def test_a_missing_seed_is_drawn_at_random(tokenizer: Tokenizer) -> None:
    seeds = {parse_one(tokenizer).seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) >= 2**32
    assert all(0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("excluded", [True, False])
def test_exclude_input_in_output_is_read(tokenizer: Tokenizer, excluded: bool) -> None:
    assert parse_one(tokenizer, exclude_input_in_output=excluded).exclude_input_in_output is excluded


def test_the_prompt_is_kept_and_encoded_as_by_the_tokenizer(tokenizer: Tokenizer) -> None:
    request = parse_one(tokenizer, text_input="Grüße 🙂\n")
    assert request.prompt == "Grüße 🙂\n"
    assert request.prompt_tokens == tuple(tokenizer.pretrained("Grüße 🙂\n")["input_ids"])
    assert request.prompt_tokens[0] == tokenizer.pretrained.bos_token_id
    assert parse_one(tokenizer, text_input=" ").prompt == " "


def test_a_missing_or_empty_prompt_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=r"^text_input is missing: it is the one input without a default$"):
        parser(tokenizer).parse({})
    assert refusal(tokenizer, text_input="") == "text_input is ''; it must be a text of at least one token"


def test_the_prompt_is_bounded_in_tokens(tokenizer: Tokenizer) -> None:
    longest = parse_one(tokenizer, text_input=prompt_of(LONGEST_PROMPT, tokenizer))
    assert len(longest.prompt_tokens) == LONGEST_PROMPT
    message = refusal(tokenizer, text_input=prompt_of(LONGEST_PROMPT + 1, tokenizer))
    assert message == (
        f"text_input is {LONGEST_PROMPT + 1} tokens; it must be at most {LONGEST_PROMPT} tokens (max_model_len - 1)"
    )


@dataclass(frozen=True)
class NeverUsed(Tokenizer):
    """A tokenizer that must not be called."""

    def encode(self, text: str) -> tuple[int, ...]:
        raise AssertionError(f"{len(text)} characters were tokenized")


def test_a_prompt_too_long_for_the_longest_tokens_is_refused_without_tokenization(tokenizer: Tokenizer) -> None:
    never_used = NeverUsed(tokenizer.pretrained, tokenizer.vocabulary)
    size = LONGEST_PROMPT * tokenizer.vocabulary.longest + 1
    expected = f"^text_input is a text of {size} bytes; it must be at most {LONGEST_PROMPT} tokens"
    with pytest.raises(InvalidRequest, match=expected):
        parser(never_used, GenerationDefaults(max_tokens=1)).parse(raw(text_input="x" * size))


def test_a_prompt_of_the_longest_tokens_is_accepted(tokenizer: Tokenizer) -> None:
    longest = max(tokenizer.vocabulary.token_bytes, key=len).decode()
    prompt = longest * ((LONGEST_PROMPT - 1) // (len(tokenizer.encode(longest)) - 1))
    assert parse_one(tokenizer, text_input=prompt).prompt == prompt


@pytest.mark.parametrize("invalid", [b"\xff", b"ok \xc3", b"\xed\xa0\x80", b"\xc0\xaf"])
@pytest.mark.parametrize("name", ["text_input", "stop_words", "bad_words"])
def test_invalid_utf8_is_refused_with_byte_and_offset(tokenizer: Tokenizer, name: str, invalid: bytes) -> None:
    offset = 3 if invalid.startswith(b"ok") else 0
    position = f"byte 0x{invalid[offset]:02x} at offset {offset}"
    assert refusal(tokenizer, **{name: invalid}) == f"{name} is not UTF-8 ({position}); it must be UTF-8 text"


@pytest.mark.parametrize(
    ("name", "bound", "limit"), [("stop_words", MAX_STOP_WORDS, 16), ("bad_words", MAX_BAD_WORDS, 64)]
)
def test_a_list_of_words_is_bounded_in_length(tokenizer: Tokenizer, name: str, bound: int, limit: int) -> None:
    assert bound == limit
    words = [f"w{index}" for index in range(limit)]
    padded = [*words, "", ""]
    assert getattr(parse_one(tokenizer, **{name: padded}), name) == tuple(word.encode() for word in words)
    message = refusal(tokenizer, **{name: [*words, "one more"]})
    assert message == f"{name} is a list of {limit + 1} words; it must be at most {limit} words"


@word_lists
def test_empty_words_are_ignored(tokenizer: Tokenizer, name: str) -> None:
    assert getattr(parse_one(tokenizer, **{name: [""]}), name) == ()
    assert getattr(parse_one(tokenizer, **{name: ["", "é ", ""]}), name) == ("é ".encode(),)


@word_lists
def test_a_word_is_bounded_in_bytes(tokenizer: Tokenizer, name: str) -> None:
    longest = "é" * 512
    assert getattr(parse_one(tokenizer, **{name: ["a", longest]}), name) == (b"a", longest.encode())
    message = refusal(tokenizer, **{name: ["a", longest + "."]})
    assert message == f"{name} is a list with a word of 1025 bytes; it must be of words of at most 1024 bytes"
