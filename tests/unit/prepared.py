"""Short ways to a prepared checkpoint, for tests that need a real one."""

from __future__ import annotations

from pathlib import Path

import torch
from engine.small_checkpoints import small_config
from llama_engine.model.manifest import Manifest
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaForCausalLM
from triton_prepare.hub import Hub
from triton_prepare.run import Order, prepare

NOWHERE = "http://127.0.0.1:9"
"""A hub that isn't there."""


def prepare_folder(model: Path | str, out: Path, force: bool = False) -> Manifest:
    """Prepare the checkpoint of a folder on the CPU."""
    return prepare(Order(str(model), None, out, "cpu", force), Hub(NOWHERE, out.parent / "no-cache"))


def save_small_in(dtype: torch.dtype, folder: Path, tokenizer: Tokenizer, max_shard_size: str = "1GB") -> Path:
    """Save an untrained Llama in a dtype, in as many files as that size makes necessary."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(small_config(tokenizer))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    tokenizer.pretrained.save_pretrained(folder)
    return folder


def states(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, size and time of change of every file: what nobody wrote to is the same."""
    stats = {path.name: path.stat() for path in folder.iterdir()}
    return {name: (stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}
