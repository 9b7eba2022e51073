"""Every input of the contract arrives over every endpoint, alone in a row and in a row of its own.

What an input means is tested in tests/engine; here a value has an effect, or is another way to write a request.
"""

from __future__ import annotations

import json
from functools import partial

import pytest
from server.clients import FLAGS, TENSOR_WIRES, WIRES, Answer, ask, at_once, everywhere, post
from server.servers import EMBEDDED
from tokenizers import Tokenizer
from triton_local.server import LocalTriton

PROMPT = "Return a list of the"
TWELVE: dict[str, object] = {"text_input": PROMPT, "max_tokens": 12, "min_tokens": 12}
HOT = {**TWELVE, "temperature": 2.0, "top_p": 1.0, "seed": 7}
GREEDY = {**TWELVE, "temperature": 0.0, "repetition_penalty": 1.0}
TOKENIZER = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
(ZEBRA,) = TOKENIZER.encode(" zebra").ids[-1:]


@pytest.mark.parametrize(
    ("base", "changed"),
    [
        (GREEDY, {"text_input": "The class"}),
        (GREEDY, {"max_tokens": 13}),
        (GREEDY, {"min_tokens": 0, "stop_words": ["absent \N{SNOWMAN}", "e"]}),
        (GREEDY, {"temperature": 2.0, "seed": 7}),
        (HOT, {"top_k": 1}),
        (HOT, {"top_p": 1e-6}),
        (HOT, {"min_p": 1.0}),
        (HOT, {"seed": 2**64 - 1}),
        *(
            ({**GREEDY, "max_tokens": 40, "min_tokens": 40}, {f"{name}_penalty": 2.0})
            for name in ("repetition", "frequency", "presence")
        ),
        (GREEDY, {"bad_words": ["\N{SNOWMAN}", "e"]}),
        (GREEDY, {"exclude_input_in_output": False}),
        (GREEDY, {"logit_bias": json.dumps({str(ZEBRA): 100})}),
        (GREEDY, {"embedding_bias_words": [" zebra"], "embedding_bias_weights": [100.0]}),
        (GREEDY, {"allowed_token_ids": [ZEBRA]}),
        (GREEDY, {"logit_bias": json.dumps({str(ZEBRA): 100}), "min_tokens": 0, "stop_token_ids": [ZEBRA]}),
        ({**GREEDY, "min_tokens": 0, "max_tokens": 60}, {"ignore_eos": True}),
    ],
    ids=lambda values: ",".join(values) if len(values) < 4 else "",
)
def test_an_input_has_an_effect(triton: LocalTriton, base: dict[str, object], changed: dict[str, object]) -> None:
    assert everywhere(triton, **base | changed) != everywhere(triton, **base)


@pytest.mark.parametrize(
    "same",
    [
        *({name: [""]} for name in ("stop_words", "bad_words")),
        *({name: False} for name in ("stream", *FLAGS)),
        {"pad_id": 0, "beam_width": 1, "length_penalty": 1.5, "end_id": -1},
        {"num_return_sequences": 1, "min_length": 12, "random_seed": 7},
        {"top_p": 0.0, "temperature": 1.5},
        {"sampling_parameters": json.dumps({"temperature": "0", "max_tokens": "12", "min_tokens": 12, "top_k": -1})},
        {"input_ids": TOKENIZER.encode(PROMPT).ids},
    ],
    ids=lambda values: ",".join(values),
)
def test_an_alias_an_empty_word_or_a_compatibility_flag_changes_nothing(
    triton: LocalTriton, same: dict[str, object]
) -> None:
    replaced = {*same, *json.loads(str(same.get("sampling_parameters", "{}")))}
    replaced |= {"min_tokens"} if "min_length" in same else {"text_input"} if "input_ids" in same else set()
    inputs = {name: value for name, value in GREEDY.items() if name not in replaced}
    assert everywhere(triton, **inputs, **same) == everywhere(triton, **GREEDY)


def test_only_the_prompt_is_required(triton: LocalTriton) -> None:
    for answer in at_once([partial(ask, triton, wire, text_input=PROMPT) for wire in WIRES]):
        assert 1 <= answer.num_output_tokens <= 128
        assert answer.finish_reason == "stop" or answer.num_output_tokens == 128
    refused = post(triton, "generate", {"max_tokens": 3})
    assert refused.status_code == 400
    assert "text_input is missing, and so is input_ids" in refused.json()["error"]


def test_request_parameters_are_inputs(triton: LocalTriton) -> None:
    prompt = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": [PROMPT]}
    parameters = {name: value for name, value in GREEDY.items() if name != "text_input"}
    answered = post(triton, "infer", {"inputs": [prompt], "parameters": parameters}).json()
    outputs = {output["name"]: output for output in answered["outputs"]}
    assert outputs["text_output"]["shape"] == [1]
    assert outputs["text_output"]["data"] == [ask(triton, **GREEDY).text]
    twice = post(triton, "infer", {"inputs": [prompt], "parameters": {"seed": 1, "random_seed": 2}})
    assert twice.status_code == 400
    assert "seed is 1 and random_seed is 2; the field must have one value" in twice.json()["error"]


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
