"""The number formats of weights: their names, their sizes, and how large a checkpoint is in each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from safetensors import safe_open

Weights = Literal["fp32", "fp16", "int8"]

BYTES: dict[Weights, int] = {"fp32": 4, "fp16": 2, "int8": 1}
"""Of one number. In INT8 every row of a matrix has a scale of its own beside them."""


def unquantized() -> Weights:
    """Return in what unquantized weights are fastest on this machine: FP16 on a GPU, FP32 on a CPU.

    CPUs without instructions of their own for it (AMX, AVX512-FP16) compute products of 16 bits slower than of 32.
    """
    # Only now: those who only name formats, the report among them, do without PyTorch.
    import torch

    return "fp16" if torch.cuda.is_available() else "fp32"


def dtype(weights: Weights) -> str:
    """Return torch's name of the format."""
    return {"fp32": "float32", "fp16": "float16", "int8": "int8"}[weights]


def mebibytes(checkpoint: Path, weights: Weights) -> float:
    """Return how much memory all weights of the checkpoint take in that format, from the headers of its files."""
    parameters = 0
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            parameters += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
    return parameters * BYTES[weights] / 2**20
