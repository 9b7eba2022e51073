"""Tests that load the embedded checkpoint in the process, without a server.

They compute on one thread: the embedded model is so small that two are no faster, and CI uses the other core.
"""

import torch
from engine.checkpoints import fp32, int8, tokenizer

__all__ = ["fp32", "int8", "tokenizer"]

torch.set_num_threads(1)
