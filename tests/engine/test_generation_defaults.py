"""Defaults from the checkpoint's generation config, and which values are refused."""

import math

import pytest
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import Checkpoint
from llama_engine.request.defaults import GenerationDefaults
from llama_engine.request.parameters import PARAMETERS
from transformers import GenerationConfig, LlamaConfig

VOCABULARY = 1000
SAMPLED: dict[str, object] = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.1}
OTHERS: dict[str, object] = {"repetition_penalty": 1.1, "max_new_tokens": 7, "min_new_tokens": 3}


def _defaults(default_max_tokens: int = 128, /, **values: object) -> GenerationDefaults:
    """Read a config with these values, set without transformers' checks: a file may hold anything."""
    config = GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return GenerationDefaults.from_config(config, default_max_tokens, VOCABULARY)


def test_every_value_of_the_config_is_used() -> None:
    defaults = _defaults(do_sample=True, **SAMPLED, **OTHERS, eos_token_id=[2, 5])
    assert defaults.values == {"max_tokens": 7, "min_tokens": 3, "repetition_penalty": 1.1, **SAMPLED}
    assert defaults.end_tokens == {2, 5}


def test_a_greedy_config_ignores_its_sampling_values() -> None:
    defaults = _defaults(do_sample=False, **SAMPLED, **OTHERS)
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert defaults.values == {"max_tokens": 7, "min_tokens": 3, "repetition_penalty": 1.1, **greedy}


def test_an_empty_config_gives_the_defaults_of_the_table() -> None:
    defaults = _defaults(9, eos_token_id=0)
    table = {name: row.default for name, row in PARAMETERS.items() if row.checkpoint}
    assert defaults.values == {**table, "max_tokens": 9}
    assert defaults.end_tokens == {0}


def test_sampling_without_a_temperature_is_at_one() -> None:
    assert _defaults(do_sample=True, temperature=None).values["temperature"] == 1.0


@pytest.mark.parametrize(
    ("name", "values", "bound"),
    [
        ("max_new_tokens", [0], "a whole number, at least 1"),
        ("min_new_tokens", [-1], "a whole number, at least 0"),
        ("temperature", [-0.1, 2.1, math.nan], "a finite number, at least 0 and at most 2"),
        ("top_k", [-1], "a whole number, at least 0"),
        ("top_p", [-0.1, 1.1, math.nan], "a finite number, at least 0 and at most 1"),
        ("eos_token_id", [-1, 1000], "below 1000"),
        ("repetition_penalty", [0.0, math.inf, math.nan], "a finite number, greater than 0"),
    ],
)
def test_a_value_beyond_its_bound_is_refused(name: str, values: list[float], bound: str) -> None:
    for value in values:
        expected = rf"^generation_config\.json, or .*: {name} is {value}; it must be {bound}$"
        with pytest.raises(CheckpointError, match=expected):
            _defaults(do_sample=True, **{name: value})


def test_a_refusal_names_the_config_that_stands_in_for_a_missing_file() -> None:
    config = GenerationConfig.from_model_config(LlamaConfig(eos_token_id=VOCABULARY))
    with pytest.raises(CheckpointError, match=r"or the model's config without one: eos_token_id is 1000; "):
        GenerationDefaults.from_config(config, 128, VOCABULARY)


def test_the_embedded_checkpoint_has_an_end_token(fp32: Checkpoint) -> None:
    defaults = GenerationDefaults.from_config(fp32.generation_config, 128, VOCABULARY)
    assert defaults.end_tokens == {fp32.tokenizer.pretrained.eos_token_id}
    assert f"end_tokens={sorted(defaults.end_tokens)}" in defaults.describe()
