"""Defaults from the checkpoint's generation config, and which values are refused."""

import math

import pytest
from llama_engine.api.defaults import GenerationDefaults
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import Checkpoint
from transformers import GenerationConfig

VOCABULARY = 1000


def _defaults(default_max_tokens: int = 128, /, **values: object) -> GenerationDefaults:
    """Read a config with these values, set without transformers' checks: a file may hold anything."""
    config = GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return GenerationDefaults.from_config(config, default_max_tokens, VOCABULARY)


def test_every_value_of_the_config_is_used() -> None:
    sampled = {"temperature": 0.6, "top_p": 0.9, "top_k": 40}
    others = {"repetition_penalty": 1.1, "max_new_tokens": 7, "min_new_tokens": 3, "eos_token_id": [2, 5]}
    ends = frozenset({2, 5})
    assert _defaults(do_sample=True, **sampled, **others) == GenerationDefaults(7, 3, 0.6, 40, 0.9, 1.1, ends)
    # A greedy config ignores its sampling values.
    assert _defaults(do_sample=False, **sampled, **others) == GenerationDefaults(7, 3, 0.0, 0, 1.0, 1.1, ends)


def test_an_empty_config_gives_the_contracts_defaults() -> None:
    assert _defaults(9, eos_token_id=0) == GenerationDefaults(9, 0, 0.0, 0, 1.0, 1.0, frozenset({0}))
    assert _defaults(do_sample=True) == GenerationDefaults(128, 0, 1.0)


@pytest.mark.parametrize(
    ("name", "values", "bound"),
    [
        ("max_new_tokens", [0], "at least 1"),
        ("min_new_tokens", [-1], "at least 0"),
        ("temperature", [-0.1, 2.1, math.nan], "from 0 to 2"),
        ("top_k", [-1], "at least 0"),
        ("top_p", [0.0, 1.1, math.nan], r"in \(0, 1\]"),
        ("eos_token_id", [-1, 1000], "below 1000"),
        ("repetition_penalty", [0.0, math.inf, math.nan], "a finite number above 0"),
    ],
)
def test_a_value_outside_the_contract_is_refused(name: str, values: list[float], bound: str) -> None:
    for value in values:
        with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {name} is {value}; it must be {bound}$"):
            _defaults(do_sample=True, **{name: value})


def test_the_embedded_checkpoint_has_an_end_token(fp32: Checkpoint) -> None:
    defaults = GenerationDefaults.from_config(fp32.generation_config, 128, VOCABULARY)
    assert defaults.end_tokens == {fp32.tokenizer.pretrained.eos_token_id}
    assert f"end_tokens={sorted(defaults.end_tokens)}" in defaults.describe()
