"""A checkpoint that brings code: it is never run, whatever the checkpoint says that it is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine.engines import load
from engine.small_checkpoints import save_small
from llama_engine.errors import CheckpointError
from llama_engine.text.tokenizer import Tokenizer

AUTO_MAP = {
    "AutoConfig": "payload.PayloadConfig",
    "AutoModelForCausalLM": "payload.PayloadModel",
    "AutoTokenizer": ["payload.PayloadTokenizer", None],
}


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Where a file appears when the checkpoint's code is run."""
    return tmp_path / "ran"


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer, ran: Path) -> Path:
    """A Llama with code beside it, and the word that the code is to be used."""
    folder = save_small(tmp_path / "small", tokenizer)
    (folder / "payload.py").write_text(f"open({str(ran)!r}, 'w')\nclass PayloadConfig: ...\n")
    for name in ("config.json", "tokenizer_config.json"):
        file = folder / name
        file.write_text(json.dumps({**json.loads(file.read_text()), "auto_map": AUTO_MAP}))
    return folder


def test_the_code_beside_a_llama_is_run(folder: Path, ran: Path) -> None:
    # transformers has a Llama of its own, and takes that.
    assert load("none", model=str(folder)).config.model_type == "llama"
    assert not ran.exists()


def test_the_code_of_a_model_that_transformers_does_not_know_is_run(folder: Path, ran: Path) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "payload"}))
    with pytest.raises(CheckpointError) as refused:
        load("none", model=str(folder))
    assert "\n" not in str(refused.value)
    assert str(refused.value).startswith(f"can't load {folder}: ")
    assert not ran.exists()
