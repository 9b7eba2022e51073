"""The KV cache of the PyTorch runner: one pool of pages, allocated once.

A page holds the keys and values of `page_size` consecutive positions of one sequence, in all layers. `PageManager`
decides which sequence has which pages; several sequences can share a page. A sequence in the engine has a slot of
the page table. A forward pass names the slot and the position of each of its tokens; the table has the page. Page 0
is the null page: the table's entries without a page, and what padding writes to.

Positions beyond a sequence's length have stale values, possibly NaN, which would pass through a mask (0 · NaN is NaN).
So readers replace them by zeros.

In INT8, each key and each value has a scale per position and head: x ≈ scale · q with |q| ≤ 127.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from llama_engine.kernels.cache_shape import SCALE, KVCacheShape
from llama_engine.kernels.transfers import to_device


class KVCache:
    """The pool, per layer keys and values [pages, page size, KV heads, head dim], and the page table. Not thread-safe.

    The layout is that of FlashAttention. PyTorch's other attention reads copies of a sequence's pages.
    """

    def __init__(self, shape: KVCacheShape, device: torch.device) -> None:
        self.shape = shape
        size = (shape.layers, shape.pages + 1, shape.page_size, shape.key_value_heads)
        self.keys = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._quantized = shape.dtype == torch.int8
        scales = size if self._quantized else (shape.layers, 0)
        self.key_scales = torch.zeros(scales, dtype=SCALE, device=device)
        self.value_scales = torch.zeros_like(self.key_scales)
        self._tensors = [self.keys, self.values]
        if self._quantized:
            self._tensors += [self.key_scales, self.value_scales]
        self.page_table = torch.zeros(shape.slots, shape.columns, dtype=torch.int32, device=device)
        """The pages of each slot, [slots, columns]; captured steps read it at this address."""
        # On a CPU `read` copies to this memory: new memory would cost a page fault for every 4 KiB.
        copies = (2, shape.pages_of(shape.max_model_len), *self.keys.shape[2:])
        self._copies = torch.empty(copies, dtype=shape.dtype) if device.type == "cpu" else None

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set the pages of a slot's sequence from its `first`-th on; page 0, the null page, stands for none."""
        table = self.page_table
        table[slot, first : first + len(pages)] = to_device(pages, table.device, torch.int32)

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return where the pool has these positions [n] of slots [n]: indices [n] of the positions of all pages.

        Padding has the position max_model_len, which is in the null page.
        """
        size = self.shape.page_size
        pages = self.page_table[slots, positions // size].masked_fill(positions >= self.shape.max_model_len, 0)
        return torch.add(positions % size, pages, alpha=size)

    def write(self, layer: int, places: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the keys and values [n, KV heads, head dim] of n tokens at their places [n]."""
        if self._quantized:
            keys, self.key_scales[layer].flatten(0, 1)[places] = _quantize(keys)
            values, self.value_scales[layer].flatten(0, 1)[places] = _quantize(values)
        self.keys[layer].flatten(0, 1)[places] = keys.to(self.shape.dtype)
        self.values[layer].flatten(0, 1)[places] = values.to(self.shape.dtype)

    def copy(self, source: int, target: int) -> None:
        """Copy page `source` to page `target`, in every layer."""
        for tensor in self._tensors:
            tensor[:, target] = tensor[:, source]

    def read(
        self, layer: int, slot: int, end: int, dtype: torch.dtype, begin: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys and values of a slot's positions [begin, end), [KV heads, end - begin, head dim] each.

        They are valid until the next call.
        """
        page = begin // self.shape.page_size
        first = page * self.shape.page_size
        pages = self.page_table[slot, page : self.shape.pages_of(end)]
        out = (None, None) if self._copies is None else self._copies[:, : len(pages)]
        keys, values = (states[begin - first : end - first] for states in self._pages(layer, pages, dtype, out))
        return keys.transpose(0, 1), values.transpose(0, 1)

    def gather(
        self, layer: int, slots: torch.Tensor, held: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys and values of the first `span` positions, [batch, KV heads, span, head dim] each.

        slots: [batch]. held: [batch, span], bool, the positions that the slot's sequence has; others are zeros.
        """
        batch, span = held.shape
        pages = self.page_table[slots, : self.shape.pages_of(span)]
        stale = ~held[..., None, None]
        keys, values = (
            states.view(batch, -1, *states.shape[1:])[:, :span].masked_fill_(stale, 0).transpose(1, 2)
            for states in self._pages(layer, pages.flatten(), dtype)
        )
        return keys, values

    def _pages(
        self, layer: int, pages: torch.Tensor, dtype: torch.dtype, out: Iterable[torch.Tensor | None] = (None, None)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the keys and values of n pages, [n · page size, KV heads, head dim] each.

        out: memory for them in the cache's dtype, [n, page size, KV heads, head dim] each.
        """
        keys, values = (
            torch.index_select(tensor[layer], 0, pages, out=copies).flatten(0, 1).to(dtype)
            for tensor, copies in zip(self._tensors, out, strict=False)
        )
        for states, scales in zip((keys, values), self._tensors[2:], strict=False):
            states *= scales[layer].index_select(0, pages).flatten(0, 1)[..., None].to(dtype)
        return keys, values


def _quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to the range of INT8: return q [n, heads, dim], whole numbers in float32, and scales [n, heads].

    The scale of a vector with an infinity or NaN is not finite.
    """
    largest = states.float().abs().amax(-1)
    scales = largest / 127
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    return (states.float() * inverse[..., None]).round(), scales
