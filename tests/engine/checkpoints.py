"""The embedded checkpoint, loaded once in each precision, and small untrained ones on disk with its tokenizer.

A folder's conftest imports the fixtures that it needs.
"""

import shutil
from pathlib import Path

import pytest
import torch
from engine.engines import load
from llama_engine.model.loader import LoadedModel
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

# Of its 2,048 positions: tests that fill the context or the default cache take a quarter of the time and memory.
CONTEXT = "512"


@pytest.fixture(scope="session")
def fp32() -> LoadedModel:
    return load("none", max_model_len=CONTEXT)


@pytest.fixture(scope="session")
def int8() -> LoadedModel:
    return load("int8", max_model_len=CONTEXT)


@pytest.fixture(params=["fp32", "int8"])
def checkpoint(request: pytest.FixtureRequest) -> LoadedModel:
    """In PyTorch, and by the compiled kernels where they are built."""
    loaded: LoadedModel = request.getfixturevalue(request.param)
    return loaded


@pytest.fixture(scope="session")
def tokenizer(fp32: LoadedModel) -> Tokenizer:
    """The embedded checkpoint's tokenizer."""
    return fp32.tokenizer


def small_config(tokenizer: Tokenizer, **changed: object) -> LlamaConfig:
    values: dict[str, object] = {
        "vocab_size": len(tokenizer.vocabulary.token_bytes), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "tie_word_embeddings": False,
    }  # fmt: skip
    return LlamaConfig(**{**values, **changed})  # type: ignore[arg-type]


def save_small(folder: Path, tokenizer: Tokenizer, **changed: object) -> Path:
    """Save an untrained Llama of two layers with an untied head."""
    torch.manual_seed(0)
    LlamaForCausalLM(small_config(tokenizer, **changed)).save_pretrained(folder)
    tokenizer.pretrained.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_checkpoint(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained Llama that no test changes."""
    return save_small(tmp_path_factory.mktemp("small") / "small", tokenizer)


@pytest.fixture
def folder(small_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copytree(small_checkpoint, tmp_path / "small"))
