"""Tests that load the embedded checkpoint in the process, without a server.

They compute on one thread: the embedded model is so small that two are no faster, and CI uses the other core.
"""

import torch
from engine.checkpoints import checkpoint, fp32, int8, tokenizer
from engine.guided_texts import any_tokenizer, engine_with_guides, guides, own_guides

__all__ = ["any_tokenizer", "checkpoint", "engine_with_guides", "fp32", "guides", "int8", "own_guides", "tokenizer"]

torch.set_num_threads(1)
