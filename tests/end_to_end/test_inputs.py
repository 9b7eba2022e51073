"""Inputs of every type arrive over every endpoint, in a row of their own. What each means is tested in tests/engine."""

from __future__ import annotations

import pytest
from end_to_end.servers import EMBEDDED
from end_to_end.wires import TENSOR_WIRES, Answer, ask, everywhere
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
GREEDY: dict[str, object] = {
    "text_input": PROMPT, "max_tokens": 12, "min_tokens": 12, "temperature": 0.0, "repetition_penalty": 1.0,
}  # fmt: skip
TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
(ZEBRA,) = TOKENIZER.encode(" zebra").ids[-1:]


@pytest.mark.parametrize(
    "changed",
    [
        {"max_tokens": 13},
        {"temperature": 2.0, "seed": 2**64 - 1},
        {"bad_words": ["\N{SNOWMAN}", "e"]},
        {"exclude_input_in_output": False},
        {"allowed_token_ids": [ZEBRA]},
        {"embedding_bias_words": [" zebra"], "embedding_bias_weights": [100.0]},
    ],
    ids=",".join,
)
def test_an_input_has_an_effect(triton: LocalTriton, changed: dict[str, object]) -> None:
    assert everywhere(triton, **GREEDY | changed) != everywhere(triton, **GREEDY)


def test_a_prompt_of_tokens_is_answered_as_its_text(triton: LocalTriton) -> None:
    ids = {name: value for name, value in GREEDY.items() if name != "text_input"}
    assert everywhere(triton, **ids, input_ids=TOKENIZER.encode(PROMPT).ids) == ask(triton, **GREEDY)


def test_each_row_of_a_request_is_answered_as_if_it_were_alone(triton: LocalTriton) -> None:
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
    alone: list[Answer] = [
        ask(triton, **{name: [values[row]] for name, values in rows.items()}) for row in range(len(limits))
    ]
    for wire in TENSOR_WIRES:
        assert wire(triton, rows) == alone
    assert [answer.num_output_tokens for answer in alone] == limits
    assert [answer.text.startswith(f"Row {row}") for row, answer in enumerate(alone)] == [True, False, True, True]
