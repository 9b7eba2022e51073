"""The random checkpoints of benchmarks, and the one that is fetched."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from models.smollm2 import fetch
from perf import checkpoint


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2, vocab_size=3072,
        eos_token_id=None,
    )  # fmt: skip
    return checkpoint.words_checkpoint(config, 64, tmp_path_factory.mktemp("random"))


def test_each_layer_of_a_random_checkpoint_has_a_file(random_folder: Path) -> None:
    files = [load_file(file) for file in sorted(random_folder.glob("*.safetensors"))]
    # Embedding, layers, last norm, head.
    assert len(files) == 1 + 3 + 1 + 1
    assert {name.split(".")[2] for name in files[2]} == {"1"}
    assert {tensor.dtype for tensors in files for tensor in tensors.values()} == {torch.float16}


def test_transformers_finds_every_weight_of_a_random_checkpoint(random_folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(random_folder)
    saved = [name for file in random_folder.glob("*.safetensors") for name in load_file(file)]
    assert sorted(saved) == sorted(name for name, _ in model.named_parameters())
    assert model.generation_config.eos_token_id is None
    assert 0.019 < float(model.model.layers[0].mlp.up_proj.weight.detach().std()) < 0.021


def test_the_server_quantizes_a_random_checkpoint(random_folder: Path) -> None:
    loaded = load_checkpoint(Settings(model=str(random_folder), quantization="int8"), torch.device("cpu"))
    assert loaded.max_model_len == 64
    assert "int8" in loaded.info.linears


def test_a_default_checkpoint_that_cannot_be_had_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise fetch.FetchError("no index")

    monkeypatch.setattr(fetch, "fetch", fail)
    with pytest.raises(SystemExit, match="SmolLM2-135M-Instruct can't be had: no index; MODEL="):
        checkpoint.smollm2()
