"""Unit tests and the programs they start compute on one thread: two are no faster, and CI uses the other core."""

import os

import torch

torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
