"""The dimensions of a KV cache of pages, and copies to and from a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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


def to_device(
    values: torch.Tensor | Sequence[object], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return numbers as a tensor on the device, by an asynchronous copy.

    `torch.tensor(..., device=gpu)` copies from unpinned memory, which waits for all work queued on the GPU.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def lists_to_device(
    lists: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return each list of integers as a tensor on the device, by a single copy."""
    together = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
    return torch.split(to_device(together, device), [len(values) for values in lists])


def to_host(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors of one dtype as tensors of the host, by a single copy."""
    together = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(together, [tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
