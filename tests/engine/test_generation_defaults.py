"""Defaults from the checkpoint's generation config, and which values are refused."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from engine.engines import completions, engine_of
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import LoadedModel
from llama_engine.request.defaults import GenerationDefaults
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.request.parameters import PARAMETERS
from llama_engine.request.parser import RequestParser
from transformers import GenerationConfig

SAMPLED: dict[str, object] = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.1}
OTHERS: dict[str, object] = {"repetition_penalty": 1.1, "max_new_tokens": 7, "min_new_tokens": 3}


def _defaults(default_max_tokens: int = 128, /, **values: object) -> GenerationDefaults:
    """Read a config with these values, set without transformers' checks: a file may hold anything."""
    config = GenerationConfig()
    for name, value in values.items():
        setattr(config, name, value)
    return GenerationDefaults.from_config(config, default_max_tokens, {}, vocabulary=100)


def test_every_value_of_the_config_is_used() -> None:
    defaults = _defaults(do_sample=True, **SAMPLED, **OTHERS)
    assert defaults.values == {"max_tokens": 7, "min_tokens": 3, "repetition_penalty": 1.1, **SAMPLED}
    assert defaults.from_checkpoint == defaults.values.keys()
    assert not defaults.ignored


def test_a_greedy_config_ignores_its_sampling_values() -> None:
    defaults = _defaults(do_sample=False, **SAMPLED, **OTHERS)
    greedy = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert defaults.values == {"max_tokens": 7, "min_tokens": 3, "repetition_penalty": 1.1, **greedy}


def test_an_empty_config_gives_the_defaults_of_the_table() -> None:
    defaults = _defaults(9)
    table = {name: row.default for name, row in PARAMETERS.items() if row.checkpoint}
    assert defaults.values == {**table, "max_tokens": 9}
    assert not defaults.from_checkpoint


def test_sampling_without_a_temperature_is_at_one() -> None:
    assert _defaults(do_sample=True, temperature=None).values["temperature"] == 1.0


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("max_new_tokens", 0, "a whole number, at least 1"),
        ("temperature", 2.1, "a finite number, at least 0 and at most 2"),
        ("suppress_tokens", 3, "a list of token ids"),
        ("bad_words_ids", 3, "a list of lists of token ids"),
        ("do_sample", 3, "a flag"),
    ],
)
def test_a_value_beyond_its_bound_is_refused(name: str, value: float, bound: str) -> None:
    expected = rf"^generation_config\.json, or .*: {name} is {value}; it must be {bound}$"
    with pytest.raises(CheckpointError, match=expected):
        _defaults(**{"do_sample": True, name: value})


def test_suppressed_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(CheckpointError, match="bad_words_ids have 100; they must be below 100"):
        _defaults(bad_words_ids=[[3], [100]])


def test_suppressed_tokens_are_those_of_single_tokens_in_both_fields() -> None:
    defaults = _defaults(suppress_tokens=[5, 3], bad_words_ids=[[3], [7], [8, 9]])
    assert defaults.suppressed == (5, 3, 7)


def test_fields_without_effect_are_named_with_their_values() -> None:
    neutral = {"num_beams": 1, "typical_p": 1.0, "max_length": 20, "pad_token_id": 7}
    defaults = _defaults(**neutral, no_repeat_ngram_size=3, bad_words_ids=[[3], [8, 9]], temperature=0.6)
    assert (
        defaults.describe_ignored() == "max_length 20, temperature 0.6, no_repeat_ngram_size 3, bad_words_ids [[8, 9]]"
    )


def test_suppressed_tokens_are_never_sampled(fp32: LoadedModel) -> None:
    greedy = engine_of(fp32)
    request = partial(GenerationRequest, prompt="", prompt_tokens=(5,), max_tokens=4, temperature=0.0)
    (first,) = completions(greedy, [request()])
    config = GenerationConfig(suppress_tokens=list(fp32.tokenizer.encode_inside(first.text)))
    changed = replace(fp32, generation_config=config)
    (parsed,) = RequestParser(fp32.tokenizer, engine_of(changed).defaults, 64).parse(
        {"input_ids": np.array([[5]], np.int32), "max_tokens": np.array([[4]], np.int32)}
    )
    (second,) = completions(greedy, [parsed])
    assert not {*fp32.tokenizer.encode_inside(second.text)} & {*config.suppress_tokens}
