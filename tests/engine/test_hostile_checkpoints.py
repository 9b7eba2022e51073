"""A damaged checkpoint is served or refused in one line: no other exception, no crash, no hang, bounded memory."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine.checkpoints import save_small
from engine.damages import DAMAGED_CHECKPOINTS, DAMAGES, GGUF_DAMAGES, memory_of_at_most
from engine.engines import engine_of, load
from llama_engine.errors import CheckpointError, InvalidSettings, OutOfMemoryPlan
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.text.tokenizer import Tokenizer
from notes import Note
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from models import gguf_checkpoints, quantized_checkpoints

MAX_MEMORY = 3 << 30
"""Bytes that loading and a few tokens may take, beside what a process with PyTorch has."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> list[Path]:
    """A checkpoint in each format, of sizes that each format's groups and blocks have."""
    parent = tmp_path_factory.mktemp("checkpoints")
    source = save_small(parent / "source", tokenizer, hidden_size=256, intermediate_size=256, head_dim=64)
    int8 = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    for name, config, shard in (("files", None, "3MB"), ("int8", int8, "1GB"), ("nf4", nf4, "1GB")):
        options = {} if config is None else {"quantization_config": config}
        saved = AutoModelForCausalLM.from_pretrained(source, **options)
        saved.save_pretrained(parent / name, max_shard_size=shard)
        tokenizer.pretrained.save_pretrained(parent / name)
    for name in ("w8a8", "w4a16", "gptq4-act-order", "awq4", "fp8"):
        quantized_checkpoints.write(source, name, parent / name)
    for name in ("q8_0", "q4_k_m"):
        (parent / name).mkdir()
        gguf_checkpoints.write(source, name, parent / name / "model.gguf")
    return sorted(parent.iterdir())


def _load_and_generate(folder: Path, quantization: str) -> None:
    """Load a checkpoint as a server does, and generate a few tokens."""
    engine = engine_of(load(quantization, model=str(folder)), 1)
    # Fails or not: values that aren't finite have no token.
    list(engine.generate([GenerationRequest(prompt="", prompt_tokens=(1, 5, 6), max_tokens=2)]))


@pytest.fixture(scope="module")
def bounded(folders: list[Path]) -> Iterator[list[Path]]:
    """The checkpoints; address space is bounded once each has been served."""
    for folder in folders:
        _load_and_generate(folder, "checkpoint")
    with memory_of_at_most(MAX_MEMORY):
        yield folders


@pytest.mark.timeout(1200)
def test_damaged_checkpoints_are_served_or_refused(bounded: list[Path], tmp_path: Path, note: Note) -> None:
    outcomes = Counter[str]()
    for seed in range(DAMAGED_CHECKPOINTS):
        draw, message = random.Random(seed), ""
        folder = bounded[seed % len(bounded)]
        is_gguf = not (folder / "config.json").exists()
        in_floats = not is_gguf and "quantization_config" not in json.loads((folder / "config.json").read_text())
        copy = Path(shutil.copytree(folder, tmp_path / "copy"))
        damage = draw.choice(GGUF_DAMAGES if is_gguf else DAMAGES)(copy, draw)
        try:
            _load_and_generate(copy, draw.choice(("int8", "none")) if in_floats else "checkpoint")
        except (CheckpointError, InvalidSettings, OutOfMemoryPlan) as error:
            message = str(error)
        outcomes["refused" if message else "served"] += 1
        shutil.rmtree(copy)
        assert not message or (message.isprintable() and len(message) < 5000), (seed, damage)
    note(f"{DAMAGED_CHECKPOINTS} damaged checkpoints: {outcomes['refused']} refused, {outcomes['served']} served")
    assert DAMAGED_CHECKPOINTS // 3 < outcomes["refused"] < DAMAGED_CHECKPOINTS
