"""What the checkpoint's generation config gives to a request that leaves inputs out, and what is refused."""

import pytest
from llama_engine.api.defaults import GenerationDefaults
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import Checkpoint
from transformers import GenerationConfig

VOCABULARY = 1000


def _config(**values: object) -> GenerationConfig:
    """A config with these values, without the checks of transformers' constructor: a file may hold anything."""
    config = GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return config


def test_a_value_of_the_config_is_not_taken() -> None:
    sampled = GenerationDefaults.from_config(
        _config(
            do_sample=True, temperature=0.6, top_p=0.9, top_k=40, repetition_penalty=1.1, max_new_tokens=7,
            min_new_tokens=3, eos_token_id=[2, 5],
        ),
        128,
        VOCABULARY,
    )  # fmt: skip
    assert sampled == GenerationDefaults(7, 3, 0.6, 40, 0.9, 1.1, frozenset({2, 5}))


def test_an_empty_config_gives_something_else_than_the_contract() -> None:
    assert GenerationDefaults.from_config(_config(), 128, VOCABULARY) == GenerationDefaults(
        128, 0, 0.0, 0, 1.0, 1.0, frozenset()
    )
    assert GenerationDefaults.from_config(_config(do_sample=True), 128, VOCABULARY).temperature == 1.0
    assert GenerationDefaults.from_config(_config(eos_token_id=0), 9, VOCABULARY).end_tokens == frozenset({0})


def test_a_greedy_config_samples_by_the_values_it_does_not_use() -> None:
    greedy = GenerationDefaults.from_config(
        _config(do_sample=False, temperature=0.6, top_p=0.9, top_k=40), 128, VOCABULARY
    )
    assert (greedy.temperature, greedy.top_p, greedy.top_k) == (0.0, 1.0, 0)


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("max_new_tokens", 0, "at least 1"),
        ("min_new_tokens", -1, "at least 0"),
        ("temperature", -0.1, "from 0 to 2"),
        ("temperature", 2.1, "from 0 to 2"),
        ("temperature", float("nan"), "from 0 to 2"),
        ("top_k", -1, "at least 0"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.1, r"in \(0, 1\]"),
        ("top_p", float("nan"), r"in \(0, 1\]"),
        ("eos_token_id", -1, "below 1000"),
        ("eos_token_id", 1000, "below 1000"),
        ("repetition_penalty", 0.0, "a finite number above 0"),
        ("repetition_penalty", float("inf"), "a finite number above 0"),
        ("repetition_penalty", float("nan"), "a finite number above 0"),
    ],
)
def test_a_value_out_of_the_contract_is_served(name: str, value: float, bound: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^generation_config\.json: {name} is {value}; it must be {bound}$"):
        GenerationDefaults.from_config(_config(do_sample=True, **{name: value}), 128, VOCABULARY)


def test_the_embedded_checkpoint_has_no_end(fp32: Checkpoint) -> None:
    defaults = GenerationDefaults.from_config(fp32.generation_config, 128, VOCABULARY)
    assert defaults.end_tokens == {fp32.tokenizer.pretrained.eos_token_id}
    assert f"end_tokens={sorted(defaults.end_tokens)}" in defaults.describe()
