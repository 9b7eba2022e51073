"""A damaged checkpoint is served or refused in one line: no other exception, no crash, no hang, bounded memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from engine.checkpoints import save_small
from llama_engine.text.tokenizer import Tokenizer
from notes import Note
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from models import gguf_checkpoints, quantized_checkpoints

FEW, MANY = 60, 1000

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Those of every format's groups and blocks."""

Save = Callable[[Path, Path, Tokenizer], object]
"""Save a checkpoint in floats, in the first folder, in another format in the second one."""


def _saved_again(
    source: Path,
    folder: Path,
    tokenizer: Tokenizer,
    quantization: BitsAndBytesConfig | None = None,
    shard: str = "1GB",
) -> None:
    """Save as transformers does. shard: maximum size of a file."""
    options = {} if quantization is None else {"quantization_config": quantization}
    AutoModelForCausalLM.from_pretrained(source, **options).save_pretrained(folder, max_shard_size=shard)
    tokenizer.pretrained.save_pretrained(folder)


def _quantized(name: str) -> Save:
    return lambda source, folder, _: quantized_checkpoints.write(source, name, folder)


def _gguf(name: str) -> Save:
    def save(source: Path, folder: Path, _tokenizer: Tokenizer) -> None:
        folder.mkdir()
        gguf_checkpoints.write(source, name, folder / "model.gguf")

    return save


_INT8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
_NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")

FORMATS: dict[str, Save] = {
    "floats": _saved_again,
    "floats-in-files": partial(_saved_again, shard="3MB"),
    "bitsandbytes-int8": partial(_saved_again, quantization=_INT8),
    "bitsandbytes-nf4": partial(_saved_again, quantization=_NF4),
    **{name: _quantized(name) for name in ("w8a8", "w4a16", "gptq4-act-order", "awq4", "fp8")},
    **{f"gguf-{name}": _gguf(name) for name in ("q8_0", "q4_k_m")},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> list[Path]:
    """A checkpoint in each format."""
    parent = tmp_path_factory.mktemp("checkpoints")
    source = save_small(parent / "source", tokenizer, **SIZES)
    for name, save in FORMATS.items():
        save(source, parent / name, tokenizer)
    return [parent / name for name in FORMATS]


def _check(folders: list[Path], first: int, end: int, note: Note) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "engine.hostile_checkpoints", str(first), str(end), *map(str, folders)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    results = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.returncode == 0, f"ended with {run.returncode} at {run.stderr[-2000:]}"
    assert [result["seed"] for result in results] == [*range(first, end)]
    for result in results:
        assert result["outcome"] in ("served", "refused"), result
        assert result["message"].isprintable(), result
        assert len(result["message"]) < 5000, result
    refused = sum(result["outcome"] == "refused" for result in results)
    note(f"{len(results)} damaged checkpoints: {refused} refused, {len(results) - refused} served")
    assert len(results) // 3 < refused < len(results)


def test_damaged_checkpoints_are_served_or_refused(folders: list[Path], note: Note) -> None:
    _check(folders, 0, FEW, note)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_thousand_damaged_checkpoints_are_served_or_refused(folders: list[Path], note: Note) -> None:
    _check(folders, FEW, MANY, note)
