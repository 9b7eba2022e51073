"""The KV cache of the CPU kernels: the keys and values of each layer in pages, and the page table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from llama_engine.kernels.cache_shape import CPU_PAGE_SIZE, KVCacheShape
from llama_engine.kernels.cpu.bindings import use_huge_pages

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The kernels' numbers for the dtypes of the KV cache."""


class PagedCache:
    """Holds the cache's tensors, to which the kernels have pointers.

    Raises ValueError if the shape has pages of another size than the kernels.
    """

    def __init__(self, shape: KVCacheShape) -> None:
        if shape.page_size != CPU_PAGE_SIZE:
            raise ValueError(f"the cache has pages of {shape.page_size} positions, and the kernels of {CPU_PAGE_SIZE}")
        self.shape = shape
        self.page_table = torch.zeros(shape.slots, shape.columns, dtype=torch.int32)
        """The pages of each slot's sequence, [slots, columns]; 0, the null page, stands for none."""
        self.layers = [self._allocate_layer() for _ in range(shape.layers)]
        """Keys, values, and for int8 their scales, of each layer."""

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set the pages of a slot's sequence from its `first`-th on.

        Raises IndexError for entries outside the table or pages outside the pool.
        """
        if not pages:
            return
        last = first + len(pages) - 1
        _check_range("slot", slot, slot, self.shape.slots)
        _check_range("column", first, last, self.shape.columns)
        _check_range("page", min(pages), max(pages), self.shape.pages + 1)
        self.page_table[slot, first : last + 1] = torch.tensor(pages, dtype=torch.int32)

    def copy(self, source: int, target: int) -> None:
        """Copy the keys and values of page `source` to page `target`, in every layer.

        Raises IndexError for a page outside the pool.
        """
        _check_range("page", min(source, target), max(source, target), self.shape.pages + 1)
        for tensors in self.layers:
            for tensor in tensors:
                tensor[:, target] = tensor[:, source]

    def refuse(self, slot: int, position: int) -> NoReturn:
        """Raise IndexError for a position without a page."""
        _check_range("slot", slot, slot, self.shape.slots)
        _check_range("position", position, position, self.shape.max_model_len)
        raise IndexError(f"position {position} of slot {slot} has no page")

    def _allocate_layer(self) -> list[torch.Tensor]:
        shape = self.shape
        heads = (shape.key_value_heads, shape.pages + 1, shape.page_size)
        tensors = [torch.empty(*heads, shape.head_dim, dtype=shape.dtype) for _ in range(2)]
        if shape.dtype == torch.int8:
            tensors += [torch.empty(heads) for _ in range(2)]
        for tensor in tensors:
            use_huge_pages(tensor)
            tensor.zero_()
        return tensors


def _check_range(what: str, lowest: int, highest: int, bound: int) -> None:
    if lowest < 0 or highest >= bound:
        raise IndexError(f"{what} {lowest if lowest < 0 else highest} is outside the KV cache of {bound} {what}s")
