"""Configs as the engine reads them, beside transformers' own."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from engine.engines import EMBEDDED
from engine.gguf_files import LLAMA3
from llama_engine.checkpoint.architecture import FAMILIES, read_architecture
from llama_engine.checkpoint.config import IRRELEVANT, USED, read_config
from llama_engine.errors import CheckpointError
from llama_engine.model.loader import loading
from transformers import CONFIG_MAPPING, GenerationConfig, LlamaConfig, PreTrainedConfig

SMALL = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 64}
LLAMA_3 = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
CONFIGS = {
    "embedded": json.loads((EMBEDDED / "config.json").read_text()),
    "defaults": {"model_type": "llama"},
    "heads": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": [2, 3]},
    "scaling of version 4": {**SMALL, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "rope_scaling": LLAMA_3},
    "older scaling": {**SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "quantized": {**SMALL, "quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}},
    "explicit nulls": {**SMALL, "rope_scaling": None, "head_dim": None, "num_key_value_heads": None},
    "generation": {**SMALL, "temperature": 0.5, "unknown": [1]},
}


def _folder(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_read_as_transformers_reads_it(config: dict[str, object], tmp_path: Path) -> None:
    folder = _folder(tmp_path, config)
    read, expected = read_config(folder, "it"), LlamaConfig.from_pretrained(folder)
    # transformers takes Llama 2's end token for one that isn't named.
    expected.eos_token_id = config.get("eos_token_id")  # type: ignore[assignment]  # a file may hold anything
    assert vars(read) == vars(expected)
    assert GenerationConfig.from_model_config(read) == GenerationConfig.from_model_config(expected)


@pytest.mark.parametrize("changed", [{"num_attention_heads": 3}, {"hidden_act": 1}])
def test_a_config_that_transformers_refuses_is_refused_in_its_words(changed: dict[str, object], tmp_path: Path) -> None:
    folder = _folder(tmp_path, {**SMALL, **changed})
    with pytest.raises(CheckpointError) as expected, loading("it"):
        LlamaConfig.from_pretrained(folder)
    with pytest.raises(CheckpointError) as found:
        read_config(folder, "it")
    assert str(found.value) == str(expected.value).replace("it: ", "it: config.json: ", 1)


def test_an_odd_number_of_rotated_dimensions_is_refused() -> None:
    options: dict[str, Any] = {"hidden_size": 96, "num_attention_heads": 4, "partial_rotary_factor": 0.55}
    config = CONFIG_MAPPING["phi3"](**options)
    with pytest.raises(CheckpointError, match=r"it: partial_rotary_factor is 0\.55, which rotates 13 dimensions"):
        read_architecture(config, "it")


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_option_in_transformers_is_known(model_type: str) -> None:
    options = CONFIG_MAPPING[model_type]().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    assert options - USED - IRRELEVANT == set()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": "128"}, "hidden_size is '128'; it must be a whole number, at least 1 and at most 16777216"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps is nan; it must be a finite number, at least 0 and at most 1"),
        ({"mlp_bias": "yes"}, "mlp_bias is 'yes'; it must be true or false"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4"),
        ({"model_type": "phi3", "hidden_size": 4}, "head_dim is 1; it must be even and at least 2"),
        (
            {"model_type": "smollm3", "num_hidden_layers": 2, "no_rope_layers": [1]},
            "no_rope_layers is [1]; it must be 2 numbers",
        ),
        ({"rope_parameters": [1]}, "rope_parameters is [1]; it must be an object"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": "8"}},
            "rope_parameters.factor is '8'; it must be a finite number, greater than 0",
        ),
        ({"quantization_config": {"quant_method": []}}, "quantization_config.quant_method is []; it must be a text"),
        ({"model_type": ["llama"]}, "model_type is ['llama']; it must be a text"),
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_refused_with_field_and_bound(
    changed: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        read_config(_folder(tmp_path, {**SMALL, **changed}), "it")
    assert str(refused.value).startswith(f"can't load it: config.json: {message}")
