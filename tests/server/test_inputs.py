"""Every input of the contract has its effect over every endpoint.

Texts depend on the checkpoint, so the expectation for one text is always derived from another.
"""

from __future__ import annotations

import json
import re
import zlib
from functools import partial

import pytest
from server.clients import TENSOR_WIRES, WIRES, ask, at_once, everywhere, generate, post
from server.servers import EMBEDDED, is_decoupled
from server.streams import STREAM_WIRES, whole
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
TWELVE = {"text_input": PROMPT, "max_tokens": 12, "min_tokens": 12}
HOT = {**TWELVE, "temperature": 2.0, "top_p": 1.0}
GREEDY = {**TWELVE, "temperature": 0.0, "repetition_penalty": 1.0}
LONG_GREEDY = {**GREEDY, "max_tokens": 40, "min_tokens": 40}


def _size(text: str) -> int:
    """Return the compressed size of a text: repetition makes it small."""
    return len(zlib.compress(text.encode(), 9))


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


def test_num_input_tokens_is_the_tokenizers_count(triton: LocalTriton) -> None:
    prompt = "def wäre(x): 名前 🐍 </s>"
    expected = len(Tokenizer.from_file(str(EMBEDDED / "tokenizer.json")).encode(prompt).ids)
    assert everywhere(triton, **GREEDY | {"text_input": prompt}).num_input_tokens == expected


def test_temperature_zero_gives_the_same_text_under_any_seed(triton: LocalTriton) -> None:
    texts = {everywhere(triton, **GREEDY, seed=seed).text for seed in (0, 1, 2**64 - 1)}
    assert len(texts) == 1


def test_a_seed_determines_the_text(triton: LocalTriton) -> None:
    texts = [everywhere(triton, **HOT, seed=seed).text for seed in (0, 2**64 - 1, 0, 2**64 - 1)]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]


def test_texts_without_a_seed_differ(triton: LocalTriton) -> None:
    texts = {answer.text for answer in at_once([partial(ask, triton, wire, **HOT) for wire in WIRES])}
    assert len(texts) == len(WIRES)


@pytest.mark.parametrize(("name", "narrow", "off"), [("top_k", 1, 0), ("top_p", 1e-6, 1.0)])
def test_the_narrowest_top_k_or_top_p_is_greedy(triton: LocalTriton, name: str, narrow: float, off: float) -> None:
    greedy = everywhere(triton, **GREEDY).text
    warm = {**HOT, "repetition_penalty": 1.0, "seed": 5}
    assert everywhere(triton, **warm | {name: narrow}).text == greedy
    assert everywhere(triton, **warm | {name: off}).text != greedy


@pytest.mark.parametrize(
    ("name", "repeat", "vary"),
    [("repetition_penalty", 0.5, 2.0), ("frequency_penalty", -2.0, 2.0), ("presence_penalty", -2.0, 2.0)],
)
def test_a_penalty_controls_repetition(triton: LocalTriton, name: str, repeat: float, vary: float) -> None:
    repeating = everywhere(triton, **LONG_GREEDY | {name: repeat}).text
    varying = everywhere(triton, **LONG_GREEDY | {name: vary}).text
    assert _size(repeating) < _size(varying)


def test_the_text_ends_before_the_first_stop_string(triton: LocalTriton) -> None:
    whole = everywhere(triton, **HOT, seed=7)
    word = _word(whole.text)
    cut = everywhere(triton, **HOT | {"min_tokens": 0}, seed=7, stop_words=["absent \N{SNOWMAN}", word])
    assert cut.text == whole.text[: whole.text.index(word)]
    assert cut.finish_reason == "stop"
    assert cut.num_output_tokens < whole.num_output_tokens


def test_stop_strings_before_min_tokens_do_not_end_the_text(triton: LocalTriton) -> None:
    whole = everywhere(triton, **HOT, seed=7)
    letter = _word(whole.text)[0]
    early = everywhere(triton, **HOT | {"min_tokens": 0}, seed=7, stop_words=[letter])
    late = everywhere(triton, **HOT | {"min_tokens": early.num_output_tokens + 1}, seed=7, stop_words=[letter])
    assert early.text == whole.text[: whole.text.index(letter)]
    assert late.num_output_tokens > early.num_output_tokens
    assert letter in late.text


def test_bad_words_never_appear(triton: LocalTriton) -> None:
    word = _word(everywhere(triton, **HOT, seed=7).text)
    without = everywhere(triton, **HOT, seed=7, bad_words=["\N{SNOWMAN}", word])
    assert word not in without.text
    assert without.num_output_tokens == 12


@pytest.mark.parametrize("name", ["stop_words", "bad_words"])
def test_an_empty_word_has_no_effect(triton: LocalTriton, name: str) -> None:
    assert everywhere(triton, **HOT, seed=7, **{name: [""]}) == everywhere(triton, **HOT, seed=7)


def test_the_prompt_precedes_the_completion_unless_excluded(triton: LocalTriton) -> None:
    alone = everywhere(triton, **GREEDY, exclude_input_in_output=True)
    both = everywhere(triton, **GREEDY, exclude_input_in_output=False)
    assert alone == everywhere(triton, **GREEDY)
    assert both.text == PROMPT + alone.text
    assert both.num_output_tokens == alone.num_output_tokens


@pytest.mark.parametrize(
    "name", ["stream", "return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"]
)
def test_a_compatibility_flag_has_no_effect(triton: LocalTriton, name: str) -> None:
    assert everywhere(triton, **GREEDY, **{name: False}) == everywhere(triton, **GREEDY)


def test_all_inputs_can_be_combined(triton: LocalTriton) -> None:
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


def test_generate_accepts_an_id(triton: LocalTriton) -> None:
    body = json.dumps({**GREEDY, "id": "42"}).encode()
    status, answer = post(f"http://{triton.http_url}/v2/models/llama/generate", body)
    assert (status, json.loads(answer)["num_output_tokens"]) == (200, 12)


PARALLEL = [
    {
        "text_input": f"Client number {index} says",
        "max_tokens": 4 + index % 12,
        "min_tokens": 4 + index % 12,
        "temperature": 1.0,
        "seed": index,
        "exclude_input_in_output": False,
    }
    for index in range(64)
]


def test_sixty_four_clients_share_thirty_two_slots_and_each_gets_its_own_text(either: LocalTriton) -> None:
    streams = is_decoupled(either)
    answers = at_once(
        [
            partial(whole, either, STREAM_WIRES[index % 3], one)
            if streams
            else partial(ask, either, WIRES[index % 4], **one)
            for index, one in enumerate(PARALLEL)
        ]
    )
    for index, answer in enumerate(answers):
        assert answer.text.startswith(f"Client number {index} says")
        assert answer.num_output_tokens == 4 + index % 12
    assert answers == at_once([partial(ask, either, generate, **one) for one in PARALLEL])
