"""INT8 per channel, with one scale for each output channel: quantizes floats and requantizes groups of columns.

A matrix is converted in blocks, by several threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from llama_engine.checkpoint.weights import LinearWeight

BLOCK = 1 << 18
"""Number of weights converted at once. Their floats fit the CPU's cache: five times faster than whole matrices."""


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Return the row ranges of the blocks of a matrix."""
    height = max(1, BLOCK // max(1, columns))
    return [slice(first, min(first + height, rows)) for first in range(0, rows, height)]


def for_each_block(blocks: Sequence[slice], work: Callable[[slice], object]) -> None:
    """Call `work` with each block, in several threads. Exceptions are passed on."""
    # One thread per block, instead of PyTorch's threads for each operation: those synchronize ten times per block,
    # and each time wait for a scheduler slice if another process runs on one of their cores.
    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "read", torch.set_num_threads, (1,)) as pool:
            for _ in pool.map(work, blocks):
                pass
    finally:
        # PyTorch's thread count is per thread, and the last value set applies to new threads.
        torch.set_num_threads(threads)


MAX_WEIGHT = 127
"""Largest magnitude of a quantized weight, that of its channel's largest value."""


def quantize_per_channel(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a float16 or float32 matrix to INT8 per channel; return it and the float32 scale of each channel.

    A float16 matrix gives the same bits as with bitsandbytes' `int8_vectorwise_quant` on a CPU, without its import,
    which takes seconds.
    """
    largest = block.abs().amax(dim=1).float()
    return torch.round(block * (MAX_WEIGHT / largest[:, None])).to(torch.int8), largest / MAX_WEIGHT


def requantized(weight: LinearWeight) -> LinearWeight:
    """Return a quantized linear layer as INT8 per channel, which rounds its groups once more."""
    if weight.scales is None or weight.scales.ndim == 1:
        return weight
    integers, scales = torch.empty_like(weight.weight), weight.scales.new_empty(len(weight.weight))

    def quantize(channels: slice) -> None:
        integers[channels], scales[channels] = quantize_per_channel(weight.channels(channels).dequantized())

    for_each_block(row_blocks(*weight.weight.shape), quantize)
    return LinearWeight(integers, scales, weight.bias)
