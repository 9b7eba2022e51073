"""Every input of the contract has its effect, whichever way it is sent.

The texts depend on the checkpoint, so what is expected of one text is always derived from another.
"""

from __future__ import annotations

import json
import re
import zlib
from functools import partial

import pytest
from server.crowd import at_once, everywhere
from server.servers import EMBEDDED
from server.wires import BAD, TENSOR_WIRES, WIRES, Refusal, ask, post
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
TWELVE = {"text_input": PROMPT, "max_tokens": 12, "min_tokens": 12}
HOT = {**TWELVE, "temperature": 2.0, "top_p": 1.0}
GREEDY = {**TWELVE, "temperature": 0.0, "repetition_penalty": 1.0}
LONG_GREEDY = {**GREEDY, "max_tokens": 40, "min_tokens": 40}


def _size(text: str) -> int:
    """Return how much there is to say about a text: repetition makes it small."""
    return len(zlib.compress(text.encode(), 9))


def _word(text: str) -> str:
    """Return some letters of a text, from behind its beginning."""
    letters = re.search("[a-z]{2,4}", text[len(text) // 3 :])
    assert letters is not None, f"{text!r} has no letters to test with"
    return letters[0]


def test_the_prompt_alone_is_enough(triton: LocalTriton) -> None:
    for answer in at_once([partial(ask, triton, wire, text_input=PROMPT) for wire in WIRES]):
        assert 1 <= answer.num_output_tokens <= 128
        assert answer.finish_reason == "stop" or answer.num_output_tokens == 128


def test_max_tokens_ends_the_text_and_is_counted(triton: LocalTriton) -> None:
    short = everywhere(triton, **GREEDY | {"max_tokens": 7, "min_tokens": 7})
    long = everywhere(triton, **GREEDY)
    assert (short.finish_reason, short.num_output_tokens) == ("length", 7)
    assert (long.finish_reason, long.num_output_tokens) == ("length", 12)
    # Its last token may be the first half of a character.
    assert long.text.startswith(short.text.rstrip("\N{REPLACEMENT CHARACTER}"))


def test_prompt_tokens_are_the_tokenizers(triton: LocalTriton) -> None:
    prompt = "def wäre(x): 名前 🐍 </s>"
    expected = len(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(prompt).ids)
    assert everywhere(triton, **GREEDY | {"text_input": prompt}).num_input_tokens == expected


def test_temperature_zero_is_one_text_whatever_the_seed(triton: LocalTriton) -> None:
    texts = {everywhere(triton, **GREEDY, seed=seed).text for seed in (0, 1, 2**64 - 1)}
    assert len(texts) == 1


def test_same_seed_same_text_and_other_seed_other_text(triton: LocalTriton) -> None:
    texts = [everywhere(triton, **HOT, seed=seed).text for seed in (0, 2**64 - 1, 0, 2**64 - 1)]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


def test_without_a_seed_texts_differ(triton: LocalTriton) -> None:
    texts = {answer.text for answer in at_once([partial(ask, triton, wire, **HOT) for wire in WIRES])}
    assert len(texts) == len(WIRES)


@pytest.mark.parametrize(("name", "narrow", "off"), [("top_k", 1, 0), ("top_p", 1e-6, 1.0)])
def test_the_narrowest_choice_is_greedy(triton: LocalTriton, name: str, narrow: float, off: float) -> None:
    greedy = everywhere(triton, **GREEDY).text
    warm = {**HOT, "repetition_penalty": 1.0, "seed": 5}
    assert everywhere(triton, **warm | {name: narrow}).text == greedy
    assert everywhere(triton, **warm | {name: off}).text != greedy


@pytest.mark.parametrize(
    ("name", "repeat", "vary"),
    [("repetition_penalty", 0.5, 2.0), ("frequency_penalty", -2.0, 2.0), ("presence_penalty", -2.0, 2.0)],
)
def test_a_penalty_changes_how_much_repeats(triton: LocalTriton, name: str, repeat: float, vary: float) -> None:
    repeating = everywhere(triton, **LONG_GREEDY | {name: repeat}).text
    varying = everywhere(triton, **LONG_GREEDY | {name: vary}).text
    assert _size(repeating) < _size(varying)


def test_the_text_ends_before_the_stop_word(triton: LocalTriton) -> None:
    whole = everywhere(triton, **HOT, seed=7)
    word = _word(whole.text)
    cut = everywhere(triton, **HOT | {"min_tokens": 0}, seed=7, stop_words=["never said \N{SNOWMAN}", word])
    assert cut.text == whole.text[: whole.text.index(word)]
    assert cut.finish_reason == "stop"
    assert cut.num_output_tokens < whole.num_output_tokens


def test_no_stop_word_counts_before_min_tokens(triton: LocalTriton) -> None:
    whole = everywhere(triton, **HOT, seed=7)
    letter = _word(whole.text)[0]
    early = everywhere(triton, **HOT | {"min_tokens": 0}, seed=7, stop_words=[letter])
    late = everywhere(triton, **HOT | {"min_tokens": early.num_output_tokens + 1}, seed=7, stop_words=[letter])
    assert early.text == whole.text[: whole.text.index(letter)]
    assert late.num_output_tokens > early.num_output_tokens
    assert letter in late.text


def test_a_bad_word_is_never_said(triton: LocalTriton) -> None:
    word = _word(everywhere(triton, **HOT, seed=7).text)
    without = everywhere(triton, **HOT, seed=7, bad_words=["\N{SNOWMAN}", word])
    assert word not in without.text
    assert without.num_output_tokens == 12


@pytest.mark.parametrize("name", ["stop_words", "bad_words"])
def test_an_empty_word_is_none(triton: LocalTriton, name: str) -> None:
    assert everywhere(triton, **HOT, seed=7, **{name: [""]}) == everywhere(triton, **HOT, seed=7)


def test_the_prompt_comes_along_when_it_is_not_excluded(triton: LocalTriton) -> None:
    alone = everywhere(triton, **GREEDY, exclude_input_in_output=True)
    both = everywhere(triton, **GREEDY, exclude_input_in_output=False)
    assert alone == everywhere(triton, **GREEDY)
    assert both.text == PROMPT + alone.text
    assert both.num_output_tokens == alone.num_output_tokens


@pytest.mark.parametrize(
    "name", ["stream", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"]
)
def test_compatibility_flags_change_nothing(triton: LocalTriton, name: str) -> None:
    assert everywhere(triton, **GREEDY, **{name: False}) == everywhere(triton, **GREEDY)


def test_streaming_is_refused_under_a_config_that_does_not_stream(triton: LocalTriton) -> None:
    for wire in WIRES:
        refusal = wire(triton, {**GREEDY, "stream": True})
        assert isinstance(refusal, Refusal)
        assert refusal.kind == BAD
        assert "stream is true" in refusal.message


def test_all_inputs_together(triton: LocalTriton) -> None:
    answer = everywhere(
        triton,
        **{
            **HOT,
            "min_tokens": 2,
            "top_k": 100,
            "top_p": 0.95,
            "repetition_penalty": 1.2,
            "frequency_penalty": 0.5,
            "presence_penalty": -0.5,
            "seed": 2**63 + 1,
            "stop_words": ["\n\n", "ä🐍"],
            "bad_words": ["self"],
            "stream": False,
            "exclude_input_in_output": False,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_num_output_tokens": True,
        },
    )
    assert answer.text.startswith(PROMPT)


def test_rows_of_one_request_are_answered_in_order(triton: LocalTriton) -> None:
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


def test_the_id_of_a_request_to_generate_is_no_unknown_input(triton: LocalTriton) -> None:
    body = json.dumps({**GREEDY, "id": "42"}).encode()
    status, answer = post(f"http://{triton.http_url}/v2/models/llama/generate", body)
    assert (status, json.loads(answer)["num_output_tokens"]) == (200, 12)
