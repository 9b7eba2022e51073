"""Tests that load the embedded checkpoint in the process, without a server.

They compute on one thread: the embedded model is so small that two are no faster, and CI uses the other core.
"""

import torch
from engine.checkpoints import checkpoint, folder, fp32, int8, small_checkpoint, tokenizer
from engine.guided_texts import engine_with_guides, own_guides

__all__ = [
    "checkpoint",
    "engine_with_guides",
    "folder",
    "fp32",
    "int8",
    "own_guides",
    "small_checkpoint",
    "tokenizer",
]

torch.set_num_threads(1)
