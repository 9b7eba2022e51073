"""INT8 rows with one scale each: quantizes floats to them, and groups of columns."""

from __future__ import annotations

import torch

from llama_engine.checkpoint.parallel_chunks import for_each_block, row_blocks
from llama_engine.checkpoint.weights import LinearWeight

MAX_WEIGHT = 127
"""Largest magnitude of a quantized weight, that of its row's largest value."""


def quantize_rows(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float16 or float32 matrix to INT8 rows; return it and the float32 scale of each row.

    Of float16 gives the same bits as bitsandbytes' `int8_vectorwise_quant` on a CPU, without its import, which takes
    seconds.
    """
    largest = block.abs().amax(dim=1).float()
    return torch.round(block * (MAX_WEIGHT / largest[:, None])).to(torch.int8), largest / MAX_WEIGHT


def requantized(weight: LinearWeight) -> LinearWeight:
    """Return a quantized linear layer as INT8 rows, which rounds its groups once more."""
    if weight.scales is None or weight.scales.ndim == 1:
        return weight
    integers, scales = torch.empty_like(weight.weight), weight.scales.new_empty(len(weight.weight))

    def quantize(rows: slice) -> None:
        integers[rows], scales[rows] = quantize_rows(weight.rows(rows).dequantized())

    for_each_block(row_blocks(*weight.weight.shape), quantize)
    return LinearWeight(integers, scales, weight.bias)
