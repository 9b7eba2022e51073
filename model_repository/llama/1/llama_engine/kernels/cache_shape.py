"""The dimensions of a KV cache of pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CPU_PAGE_SIZE = 16
"""Positions per page on a CPU, a constant in the compiled kernels."""

GPU_PAGE_SIZE = 256
"""Positions per page on a GPU: FlashAttention 2 takes multiples of 256."""

SCALE = torch.float32
"""Dtype of the scales of an INT8 cache."""


@dataclass(frozen=True)
class KVCacheShape:
    """Dimensions of a KV cache.

    slots: rows of the page table. page_size: positions per page. pages: number of pages, besides the null page.
    """

    layers: int
    slots: int
    key_value_heads: int
    max_model_len: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    pages: int

    @property
    def columns(self) -> int:
        """Entries per slot of the page table: for max_model_len positions and one that padding writes to."""
        return self.max_model_len // self.page_size + 1

    @property
    def tokens(self) -> int:
        """Number of positions in all pages."""
        return self.pages * self.page_size

    @property
    def bytes_per_token(self) -> int:
        """Bytes per position: keys and values of all layers, and their scales."""
        scale = SCALE.itemsize if self.dtype == torch.int8 else 0
        return 2 * self.layers * self.key_value_heads * (self.head_dim * self.dtype.itemsize + scale)

    @property
    def bytes(self) -> int:
        """Bytes of all pages, the null page included."""
        return (self.pages + 1) * self.page_size * self.bytes_per_token

    def pages_of(self, tokens: int) -> int:
        """Return the number of pages that hold `tokens` positions."""
        return -(-tokens // self.page_size)


def gathered_bytes(shape: KVCacheShape, dtype: torch.dtype, sequences: int) -> int:
    """Return the peak bytes of copies that attention reads for this many sequences. dtype: the activations'."""
    positions = sequences * shape.pages_of(shape.max_model_len) * shape.page_size
    itemsize = dtype.itemsize if shape.dtype == dtype else dtype.itemsize + shape.dtype.itemsize
    return 2 * positions * shape.key_value_heads * shape.head_dim * itemsize
