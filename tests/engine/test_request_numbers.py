"""The contract's numbers: both sides of every bound, what isn't finite, and what a missing one gets."""

import math
import re

import numpy as np
import pytest
from engine.contract import DEFAULTS, MAX_MODEL_LEN, parse_one
from llama_engine.errors import InvalidRequest
from llama_engine.text.tokenizer import Tokenizer

UP, DOWN = np.float32(np.inf), np.float32(-np.inf)
TWO, ONE, ZERO = np.float32(2), np.float32(1), np.float32(0)
TINY = np.nextafter(ZERO, UP)
LARGEST = np.finfo(np.float32).max

GOOD: list[tuple[str, float]] = [
    ("max_tokens", 2),  # the default of min_tokens
    ("min_tokens", 0),
    ("min_tokens", 16),
    ("temperature", 0.0),
    ("temperature", float(TINY)),
    ("temperature", 2.0),
    ("top_k", 0),
    ("top_k", 1),
    ("top_k", 2**31 - 1),
    ("top_p", float(TINY)),
    ("top_p", 1.0),
    ("repetition_penalty", float(TINY)),
    ("repetition_penalty", float(LARGEST)),
    ("frequency_penalty", -2.0),
    ("frequency_penalty", 2.0),
    ("presence_penalty", -2.0),
    ("presence_penalty", 2.0),
    ("seed", 0),
    ("seed", 2**63),
    ("seed", 2**64 - 1),
]
BAD: list[tuple[str, float | np.float32, str]] = [
    ("max_tokens", 0, "max_tokens is 0; it must be a whole number, at least 1"),
    ("max_tokens", -(2**31), "max_tokens is -2147483648; it must be a whole number, at least 1"),
    ("min_tokens", -1, "min_tokens is -1; it must be a whole number, at least 0 and at most 16"),
    ("min_tokens", 17, "min_tokens is 17; it must be a whole number, at least 0 and at most 16"),
    ("temperature", np.nextafter(ZERO, DOWN), "temperature is -1e-45; it must be a finite number, at least 0 and"),
    ("temperature", np.nextafter(TWO, UP), "temperature is 2.0000002; it must be a finite number, at least 0 and at m"),
    ("top_k", -1, "top_k is -1; it must be a whole number, at least 0"),
    ("top_p", 0.0, "top_p is 0.0; it must be a finite number, greater than 0 and at most 1"),
    ("top_p", np.nextafter(ONE, UP), "top_p is 1.0000001; it must be a finite number, greater than 0 and at most 1"),
    ("repetition_penalty", 0.0, "repetition_penalty is 0.0; it must be a finite number, greater than 0"),
    ("repetition_penalty", -1.0, "repetition_penalty is -1.0; it must be a finite number, greater than 0"),
    ("frequency_penalty", np.nextafter(TWO, UP), "frequency_penalty is 2.0000002; it must be a finite number, at l"),
    ("frequency_penalty", np.nextafter(-TWO, DOWN), "frequency_penalty is -2.0000002; it must be a finite number, at"),
    ("presence_penalty", np.nextafter(TWO, UP), "presence_penalty is 2.0000002; it must be a finite number, at least"),
    ("presence_penalty", np.nextafter(-TWO, DOWN), "presence_penalty is -2.0000002; it must be a finite number, at l"),
]
FLOATS = ("temperature", "top_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_a_value_on_the_bound_is_refused_or_changed(tokenizer: Tokenizer, name: str, value: float) -> None:
    read = getattr(parse_one(tokenizer, **{name: value}), name)
    assert read == value
    assert type(read) is (float if name in FLOATS else int)


@pytest.mark.parametrize(("name", "value", "message"), BAD)
def test_a_value_past_the_bound_is_accepted(
    tokenizer: Tokenizer, name: str, value: float | np.float32, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{re.escape(message)}"):
        parse_one(tokenizer, **{name: value})


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_accepted(tokenizer: Tokenizer, name: str, value: float) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is {value}; it must be a finite number, "):
        parse_one(tokenizer, **{name: value})


def test_max_tokens_beyond_what_fits_is_capped_in_silence(tokenizer: Tokenizer) -> None:
    prompt = len(tokenizer.encode("def f"))
    room = MAX_MODEL_LEN - prompt
    assert parse_one(tokenizer, max_tokens=room).max_tokens == room
    with pytest.raises(InvalidRequest) as refused:
        parse_one(tokenizer, max_tokens=room + 1)
    assert str(refused.value) == (
        f"max_tokens is {room + 1}; it must be at most {room}: the prompt has {prompt} tokens, "
        f"and prompt and completion together may have {MAX_MODEL_LEN}"
    )


def test_min_tokens_beyond_an_explicit_max_tokens_is_accepted(tokenizer: Tokenizer) -> None:
    assert parse_one(tokenizer, max_tokens=5, min_tokens=5).min_tokens == 5
    with pytest.raises(InvalidRequest, match=r"^min_tokens is 6; it must be a whole number, at least 0 and at most 5$"):
        parse_one(tokenizer, max_tokens=5, min_tokens=6)


def test_a_missing_input_does_not_get_its_default(tokenizer: Tokenizer) -> None:
    request = parse_one(tokenizer)
    for name in ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "repetition_penalty"):
        assert getattr(request, name) == getattr(DEFAULTS, name), name
    assert (request.frequency_penalty, request.presence_penalty) == (0.0, 0.0)
    assert (request.stop_words, request.bad_words, request.exclude_input_in_output) == ((), (), True)


def test_the_default_of_min_tokens_makes_a_short_request_impossible(tokenizer: Tokenizer) -> None:
    assert parse_one(tokenizer, max_tokens=1).min_tokens == 1


def test_requests_without_a_seed_share_one(tokenizer: Tokenizer) -> None:
    seeds = {parse_one(tokenizer).seed for _ in range(50)}
    assert len(seeds) == 50
    assert max(seeds) >= 2**32
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_exclude_input_in_output_is_not_read(tokenizer: Tokenizer) -> None:
    assert parse_one(tokenizer, exclude_input_in_output=True).exclude_input_in_output is True
    assert parse_one(tokenizer, exclude_input_in_output=False).exclude_input_in_output is False
