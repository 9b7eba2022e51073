"""Every input of the contract has its effect over every endpoint.

Texts depend on the checkpoint, so the expectation for one text is always derived from another.
"""

from __future__ import annotations

import re
import zlib
from functools import partial

import pytest
from server.clients import FLAGS, TENSOR_WIRES, WIRES, ask, at_once, everywhere
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
TWELVE = {"text_input": PROMPT, "max_tokens": 12, "min_tokens": 12}
HOT = {**TWELVE, "temperature": 2.0, "top_p": 1.0}
GREEDY = {**TWELVE, "temperature": 0.0, "repetition_penalty": 1.0}


def _word(text: str) -> str:
    """Return two to four letters from the middle of a text."""
    letters = re.search("[a-z]{2,4}", text[len(text) // 3 :])
    assert letters is not None, f"{text!r} has no letters to test with"
    return letters[0]


def test_only_the_prompt_is_required(triton: LocalTriton) -> None:
    for answer in at_once([partial(ask, triton, wire, text_input=PROMPT) for wire in WIRES]):
        assert 1 <= answer.num_output_tokens <= 128
        assert answer.finish_reason == "stop" or answer.num_output_tokens == 128


def test_max_tokens_bounds_the_text(triton: LocalTriton) -> None:
    short = everywhere(triton, **GREEDY | {"max_tokens": 7, "min_tokens": 7})
    long = everywhere(triton, **GREEDY)
    assert (short.finish_reason, short.num_output_tokens) == ("length", 7)
    assert (long.finish_reason, long.num_output_tokens) == ("length", 12)
    # Its last token may be the first half of a character.
    assert long.text.startswith(short.text.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_a_seed_determines_the_text_unless_the_temperature_is_zero(triton: LocalTriton) -> None:
    texts = [everywhere(triton, **HOT, seed=seed).text for seed in (0, 2**64 - 1, 0, 2**64 - 1)]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]
    assert len({everywhere(triton, **GREEDY, seed=seed).text for seed in (0, 2**64 - 1)}) == 1


@pytest.mark.parametrize(("name", "narrow", "off"), [("top_k", 1, 0), ("top_p", 1e-6, 1.0)])
def test_the_narrowest_top_k_or_top_p_is_greedy(triton: LocalTriton, name: str, narrow: float, off: float) -> None:
    greedy = everywhere(triton, **GREEDY).text
    warm = {**HOT, "repetition_penalty": 1.0, "seed": 5}
    assert everywhere(triton, **warm | {name: narrow}).text == greedy
    assert everywhere(triton, **warm | {name: off}).text != greedy


@pytest.mark.parametrize(("name", "repeat"), [("repetition", 0.5), ("frequency", -2.0), ("presence", -2.0)])
def test_a_penalty_controls_repetition(triton: LocalTriton, name: str, repeat: float) -> None:
    def compressed(penalty: float) -> int:
        """Return the compressed size of a text: repetition makes it small."""
        answer = everywhere(triton, **GREEDY | {"max_tokens": 40, "min_tokens": 40, f"{name}_penalty": penalty})
        return len(zlib.compress(answer.text.encode(), 9))

    assert compressed(repeat) < compressed(2.0)


def test_the_text_ends_before_the_first_stop_string_after_min_tokens(triton: LocalTriton) -> None:
    whole = everywhere(triton, **HOT, seed=7)
    word = _word(whole.text)
    for stop in (word, word[0]):
        early = everywhere(triton, **HOT | {"min_tokens": 0}, seed=7, stop_words=["absent \N{SNOWMAN}", stop])
        assert early.text == whole.text[: whole.text.index(stop)]
        assert early.finish_reason == "stop"
        assert early.num_output_tokens < whole.num_output_tokens
    late = everywhere(triton, **HOT | {"min_tokens": early.num_output_tokens + 1}, seed=7, stop_words=[word[0]])
    assert late.num_output_tokens > early.num_output_tokens
    assert word[0] in late.text


def test_bad_words_never_appear(triton: LocalTriton) -> None:
    word = _word(everywhere(triton, **HOT, seed=7).text)
    without = everywhere(triton, **HOT, seed=7, bad_words=["\N{SNOWMAN}", word])
    assert word not in without.text
    assert without.num_output_tokens == 12


def test_the_prompt_precedes_the_completion_unless_excluded(triton: LocalTriton) -> None:
    alone = everywhere(triton, **GREEDY, exclude_input_in_output=True)
    both = everywhere(triton, **GREEDY, exclude_input_in_output=False)
    assert alone == everywhere(triton, **GREEDY)
    assert both.text == PROMPT + alone.text
    assert both.num_output_tokens == alone.num_output_tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, [""]) for name in ("stop_words", "bad_words")),
        *((name, False) for name in ("stream", *FLAGS)),
    ],
)
def test_an_empty_word_or_a_compatibility_flag_has_no_effect(triton: LocalTriton, name: str, value: object) -> None:
    assert everywhere(triton, **HOT, seed=7, **{name: value}) == everywhere(triton, **HOT, seed=7)


def test_each_row_of_a_request_has_its_own_parameters_and_answer(triton: LocalTriton) -> None:
    limits = [3, 9, 1, 5]
    rows: dict[str, list[list[object]]] = {
        "text_input": [[f"Row {index}"] for index in range(len(limits))],
        "max_tokens": [[limit] for limit in limits],
        "min_tokens": [[limit] for limit in limits],
        "temperature": [[2.0], [0.0], [2.0], [2.0]],
        "seed": [[11], [12], [2**64 - 1], [14]],
        "stop_words": [["", ""], ["x", ""], ["\n", "y"], ["", "z"]],
        "exclude_input_in_output": [[False], [True], [False], [False]],
    }
    alone = [ask(triton, **{name: [values[row]] for name, values in rows.items()}) for row in range(len(limits))]
    for wire in TENSOR_WIRES:
        assert wire(triton, rows) == alone
    assert [answer.num_output_tokens for answer in alone] == limits
    assert [answer.text.startswith(f"Row {row}") for row, answer in enumerate(alone)] == [True, False, True, True]
