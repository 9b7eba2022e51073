"""The contract's inputs: both sides of every bound, defaults of missing inputs, UTF-8, prompts, words, rows, shapes."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from engine.parsing import DEFAULTS, MAX_MODEL_LEN, dtype_of, parse, parse_rows, refusal, tensor
from llama_engine.errors import InvalidRequest
from llama_engine.request.parameters import PARAMETERS
from llama_engine.request.parser import RequestParser
from llama_engine.text.tokenizer import Tokenizer

MAX_PROMPT = MAX_MODEL_LEN - 1
CONTEXT_LENGTH = f"this model's maximum context length is {MAX_MODEL_LEN} tokens"

TWO, ONE, ZERO, INFINITE = (np.float32(value) for value in (2, 1, 0, math.inf))
TINY = np.nextafter(ZERO, ONE)
LARGEST = np.finfo(np.float32).max
BEYOND_TWO = [np.nextafter(TWO, INFINITE), np.nextafter(-TWO, -INFINITE)]
PENALTY = "a finite number, at least -2 and at most 2"
SHARE = "a finite number, at least 0 and at most 1"
COUNT = "a whole number, at least 0 and at most 20"
BOUNDS: dict[str, tuple[str, list[Any], list[Any]]] = {
    # The bound as a refusal names it, values on it, values beyond it; 2 is the default of min_tokens.
    "max_tokens": ("a whole number, at least 1", [2], [0, -(2**31)]),
    # Its upper bound is max_tokens.
    "min_tokens": ("a whole number, at least 0", [0, 16], [-1]),
    "temperature": (
        "a finite number, at least 0 and at most 2", [0.0, TINY, 2.0], [-TINY, BEYOND_TWO[0], math.nan, -math.inf],
    ),
    "top_k": ("a whole number, at least 0", [0, 2**31 - 1], [-1]),
    "top_p": (SHARE, [TINY, 1.0], [-TINY, np.nextafter(ONE, TWO)]),
    "min_p": (SHARE, [0.0, 1.0], [-TINY, np.nextafter(ONE, TWO)]),
    "repetition_penalty": ("a finite number, greater than 0", [TINY, LARGEST], [0.0, math.inf]),
    "frequency_penalty": (PENALTY, [-2.0, 2.0], BEYOND_TWO),
    "presence_penalty": (PENALTY, [-2.0, 2.0], BEYOND_TWO),
    "seed": ("", [2**64 - 1], []),
    "n": ("a whole number, at least 1 and at most 16", [1, 16], [0, 17]),
    "num_logprobs": (COUNT, [0, 20], [-1, 21]),
    "prompt_logprobs": (COUNT, [0, 20], [-1, 21]),
    "priority": ("", [-(2**31), 2**31 - 1], []),
    "stream_interval_ms": ("a whole number, at least 0 and at most 1000", [0, 1000], [-1, 1001]),
}  # fmt: skip

ROWS: dict[str, list[object]] = {
    "text_input": ["def a", "class B:", "import c"],
    "max_tokens": [3, 4, 5],
    "temperature": [0.0, 0.5, 2.0],
    "seed": [0, 1, 2**64 - 1],
    "ignore_eos": [True, False, True],
    "cache_salt": ["", "team a", "ü"],
    "stop_words": [["a", "b"], ["c", ""], ["", ""]],
    "stop_token_ids": [[1, 2], [3, -1], [-1, -1]],
    "logit_bias": ['{"5": 1}', "{}", '{"0": -100, "7": 100.0}'],
}
"""Three rows with an input of each type and shape."""


def _prompt_of(tokens: int, tokenizer: Tokenizer) -> str:
    return next(text for count in range(1000) if len(tokenizer.encode(text := "def" + " x" * count)) == tokens)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, on, _) in BOUNDS.items() for value in on])
def test_a_value_on_the_bound_is_accepted_unchanged(tokenizer: Tokenizer, name: str, value: float) -> None:
    parsed = getattr(parse(tokenizer, **{name: value}), name)
    assert parsed == value
    assert type(parsed) is (int if dtype_of(name) in (np.int32, np.uint64) else float)


@pytest.mark.parametrize(
    ("name", "value", "bound"), [(name, value, bound) for name, (bound, _, off) in BOUNDS.items() for value in off]
)
def test_a_value_beyond_its_bound_is_refused_with_all_digits(
    tokenizer: Tokenizer, name: str, value: float, bound: str
) -> None:
    assert refusal(tokenizer, **{name: value}) == f"{name} is {value!s}; it must be {bound}"


@pytest.fixture
def room(tokenizer: Tokenizer) -> int:
    """Tokens that the prompt of `parse` leaves."""
    return MAX_MODEL_LEN - len(tokenizer.encode("def f"))


def test_max_tokens_beyond_the_room_is_refused(tokenizer: Tokenizer, room: int) -> None:
    assert parse(tokenizer, max_tokens=room).max_tokens == room
    assert refusal(tokenizer, max_tokens=room + 1) == (
        f"max_tokens is {room + 1}; it must be at most {room}: the prompt has {MAX_MODEL_LEN - room} tokens, "
        f"and prompt and completion together may have {MAX_MODEL_LEN}; {CONTEXT_LENGTH}"
    )


def test_the_request_overrides_whether_max_tokens_is_cut(tokenizer: Tokenizer, room: int) -> None:
    assert parse(tokenizer, None, {"truncate_max_tokens": True}, max_tokens=2000).max_tokens == room
    assert parse(tokenizer, truncate_max_tokens=True, max_tokens=2000).max_tokens == room
    assert parse(tokenizer, truncate_max_tokens=True, max_tokens=3).max_tokens == 3
    refused = refusal(tokenizer, None, {"truncate_max_tokens": True}, truncate_max_tokens=False, max_tokens=2000)
    assert refused.startswith(f"max_tokens is 2000; it must be at most {room}: ")


def test_default_lengths_are_cut_to_the_room(tokenizer: Tokenizer) -> None:
    assert parse(tokenizer, max_tokens=1).min_tokens == 1
    for length in (MAX_PROMPT, MAX_PROMPT - 1, MAX_PROMPT - 20):
        request = parse(tokenizer, text_input=_prompt_of(length, tokenizer))
        assert request.max_tokens == min(16, MAX_MODEL_LEN - length)
        assert request.min_tokens == min(2, request.max_tokens)


def test_a_missing_input_gets_its_default(tokenizer: Tokenizer) -> None:
    request = parse(tokenizer)
    assert {name: getattr(request, name) for name in DEFAULTS.values} == DEFAULTS.values
    table = {name: row.default for name, row in PARAMETERS.items() if name not in {*DEFAULTS.values, "seed"}}
    assert {name: getattr(request, name) for name in table} == table


def test_a_missing_seed_is_drawn_for_each_row(tokenizer: Tokenizer) -> None:
    seeds = {request.seed for request in parse_rows(tokenizer, text_input=["def f"] * 50)}
    assert len(seeds) == 50
    assert max(seeds) >= 2**32
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_the_prompt_is_encoded_as_by_the_tokenizer(tokenizer: Tokenizer) -> None:
    request = parse(tokenizer, text_input="Grüße 🙂\n")
    assert request.prompt == "Grüße 🙂\n"
    assert request.prompt_tokens == tuple(tokenizer.pretrained("Grüße 🙂\n")["input_ids"])
    assert request.prompt_tokens[0] == tokenizer.pretrained.bos_token_id
    assert parse(tokenizer, text_input=" ").prompt == " "


def test_a_prompt_is_required(tokenizer: Tokenizer) -> None:
    missing = r"^text_input is missing, and so is input_ids: a request must have one of them$"
    with pytest.raises(InvalidRequest, match=missing):
        parse_rows(tokenizer)
    assert refusal(tokenizer, text_input="") == "text_input is empty; it must be a prompt of at least one token"


def test_a_prompt_is_bounded_in_tokens(tokenizer: Tokenizer) -> None:
    longest = parse(tokenizer, text_input=_prompt_of(MAX_PROMPT, tokenizer))
    assert len(longest.prompt_tokens) == MAX_PROMPT
    assert refusal(tokenizer, text_input=_prompt_of(MAX_PROMPT + 1, tokenizer)) == (
        f"text_input is {MAX_PROMPT + 1} tokens; it must be at most {MAX_PROMPT} tokens (max_model_len - 1); "
        f"the prompt is too long: {CONTEXT_LENGTH}"
    )


@dataclass(frozen=True)
class _NeverUsed(Tokenizer):
    """A tokenizer that must not be called."""

    def encode(self, text: str) -> tuple[int, ...]:
        raise AssertionError(f"{len(text)} characters were tokenized")


def test_a_prompt_too_long_for_the_longest_tokens_is_not_tokenized(tokenizer: Tokenizer) -> None:
    size = MAX_PROMPT * tokenizer.vocabulary.longest + 1
    message = refusal(_NeverUsed(tokenizer.pretrained, tokenizer.vocabulary), text_input="x" * size)
    assert message.startswith(f"text_input is a text of {size} bytes; it must be at most {MAX_PROMPT} tokens")
    # One of the longest tokens has as many bytes and is accepted.
    longest = max(tokenizer.vocabulary.token_bytes, key=len).decode()
    prompt = longest * ((MAX_PROMPT - 1) // (len(tokenizer.encode(longest)) - 1))
    assert parse(tokenizer, text_input=prompt).prompt == prompt


@pytest.mark.parametrize("name", ["text_input", "stop_words", "lora_name"])
def test_invalid_utf8_is_refused_with_its_position(tokenizer: Tokenizer, name: str) -> None:
    expected = f"{name} is not UTF-8 (byte 0xc3 at offset 3); it must be UTF-8 text"
    assert refusal(tokenizer, **{name: b"ok \xc3"}) == expected


def test_the_words_of_a_request_are_not_in_its_repr(tokenizer: Tokenizer) -> None:
    """It may come into a log."""
    words = {"stop_words": ["secret"], "bad_words": ["secret"], "cache_salt": "secret", "prediction": "secret"}
    request = parse(tokenizer, text_input="def secret", **words)
    assert "secret" not in repr(request)


def test_every_row_gets_its_own_values(tokenizer: Tokenizer) -> None:
    requests = parse_rows(tokenizer, **ROWS)
    assert [request.prompt for request in requests] == ROWS["text_input"]
    assert [request.prompt_tokens for request in requests] == [tokenizer.encode(request.prompt) for request in requests]
    assert [request.stop_words for request in requests] == [(b"a", b"b"), (b"c",), ()]
    assert [request.stop_token_ids for request in requests] == [(1, 2), (3,), ()]
    assert [request.logit_bias for request in requests] == [((5, 1.0),), (), ((0, -100.0), (7, 100.0))]
    for name in ("max_tokens", "temperature", "seed", "ignore_eos", "cache_salt"):
        assert [getattr(request, name) for request in requests] == ROWS[name], name


@pytest.mark.parametrize(("name", "bad"), [("text_input", ""), ("temperature", 3)])
def test_an_error_names_its_row(tokenizer: Tokenizer, name: str, bad: object) -> None:
    first, _, third = ROWS[name]
    with pytest.raises(InvalidRequest, match=f"^batch element 1: {name} is .*; it must be "):
        parse_rows(tokenizer, **{**ROWS, name: [first, bad, third]})


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("text_input", (), "[batch, 1]"),
        ("text_input", (0, 1), "[batch, 1]"),
        ("text_input", (1, 2), "[1, 1]"),
        ("seed", (1,), "[1, 1]"),
        ("seed", (2, 1), "[1, 1]"),
        ("seed", (1, 0), "[1, 1]"),
        ("stop_words", (1, 1, 1), "[1, number of words]"),
        ("stop_token_ids", (2, 1), "[1, number of values]"),
    ],
)
def test_an_input_of_the_wrong_shape_is_refused(
    tokenizer: Tokenizer, name: str, shape: tuple[int, ...], expected: str
) -> None:
    inputs = {"text_input": tensor("text_input", ["def f"]), name: np.full(shape, b"def", np.object_)}
    with pytest.raises(InvalidRequest) as refused:
        RequestParser(tokenizer, DEFAULTS, MAX_MODEL_LEN).parse(inputs)
    assert str(refused.value).startswith(f"{name} has shape {list(shape)}; it must be {expected}")
