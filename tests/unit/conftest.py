"""Unit tests run on one thread."""

import os

import torch
from engine.checkpoints import fp32, int8, tokenizer

__all__ = ["fp32", "int8", "tokenizer"]

# The embedded model is so small that two threads are no faster, and CI runs something else on the second core. In the
# environment for the programs that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
