"""Tests that load the embedded checkpoint in the process, without a server."""

import torch
from engine.checkpoints import fp32, int8, tokenizer

__all__ = ["fp32", "int8", "tokenizer"]

# The embedded model is so small that two threads are no faster, and CI runs something else on the second core.
torch.set_num_threads(1)
