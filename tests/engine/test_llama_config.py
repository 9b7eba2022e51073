"""A Llama's config as the engine reads it, beside transformers' own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from llama_engine.errors import CheckpointError
from llama_engine.model.llama_config import read_config
from llama_engine.model.loader import EMBEDDED, loading
from transformers import GenerationConfig, LlamaConfig

SMALL = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 4, "vocab_size": 64}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CONFIGS = {
    "embedded": json.loads((EMBEDDED / "config.json").read_text()),
    "defaults": {"model_type": "llama"},
    "heads": {**SMALL, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": [2, 3]},
    "theta of version 4": {**SMALL, "rope_theta": 500000.0, "torch_dtype": "bfloat16"},
    "scaling of version 4": {**SMALL, "rope_theta": 500000.0, "rope_scaling": LLAMA_3},
    "older scaling": {**SMALL, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "quantized": {**SMALL, "quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"}},
    "explicit nulls": {**SMALL, "rope_scaling": None, "head_dim": None, "num_key_value_heads": None},
    "Llama 3.2 1B": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": [128001],
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_scaling": {**LLAMA_3, "factor": 32.0},
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "generation": {**SMALL, "temperature": 0.5, "unknown": [1]},
}


def _folder(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_config_is_read_as_transformers_reads_it(config: dict[str, object], tmp_path: Path) -> None:
    folder = _folder(tmp_path, config)
    read, expected = read_config(folder, "it"), LlamaConfig.from_pretrained(folder)
    assert vars(read) == vars(expected)
    assert GenerationConfig.from_model_config(read) == GenerationConfig.from_model_config(expected)


@pytest.mark.parametrize(
    "changed",
    [{"num_attention_heads": 3}, {"hidden_size": "128"}, {"rope_parameters": {"rope_type": "llama3", "factor": "8"}}],
)
def test_a_config_that_transformers_refuses_is_refused_in_its_words(changed: dict[str, object], tmp_path: Path) -> None:
    folder = _folder(tmp_path, {**SMALL, **changed})
    with pytest.raises(CheckpointError) as expected, loading("it"):
        LlamaConfig.from_pretrained(folder)
    with pytest.raises(CheckpointError) as found, loading("it"):
        read_config(folder, "it")
    assert str(found.value) == str(expected.value)
