"""Blocks of a matrix's rows, converted in several threads: floats to integers, packed integers to bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

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
