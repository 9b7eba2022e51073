"""Tests that load the embedded checkpoint in the process, without a server."""

import torch
from engine.checkpoints import codec, fp32, int8

__all__ = ["codec", "fp32", "int8"]

# The embedded model is so small that two threads are no faster, and CI runs something else on the second core.
torch.set_num_threads(1)
