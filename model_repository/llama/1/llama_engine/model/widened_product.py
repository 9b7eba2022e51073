"""The product with INT8 weights in float32, for CPUs: the weight is widened just before the product, block by block.

A block's buffer stays in the processor's cache, so memory is read at one byte per weight. The sums are rounded, in an
order that depends on the number of rows: a row's result is not the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

BLOCK = 1 << 20
"""Weights per block, 4 MiB in float32: smaller blocks cost calls, larger ones fall out of the cache (perf/LOG.md)."""


class BlockwiseProduct:
    """The products on a CPU, in float32; one instance for all layers of a model, which share its buffer.

    The left operand decides how the matrix library distributes work over threads. With few rows it should be the
    weight, whose rows the threads have just widened and still have in their caches: two to three times as fast as the
    other order at 2 to 64 rows, and slower from some hundreds on (perf/LOG.md). Not thread-safe.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0)

    def few_rows(
        self, activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [rows, out] as specified by `reference.int8_product`; fast for a decode step."""
        rows = activations.float().t()
        product = rows.new_empty(len(weight), rows.shape[1])
        for first, block in _blocks(weight):
            torch.mm(self._widen(block), rows, out=product[first : first + len(block)])
        return _finished(product.t(), scales, bias, activations.dtype)

    def many_rows(
        self, activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same; fast for a prefill."""
        rows = activations.float()
        product = rows.new_empty(rows.shape[0], len(weight))
        for first, block in _blocks(weight):
            torch.mm(rows, self._widen(block).t(), out=product[:, first : first + len(block)])
        return _finished(product, scales, bias, activations.dtype)

    def _widen(self, block: torch.Tensor) -> torch.Tensor:
        """Return a block [rows, in] in float32; valid until the next call."""
        if block.numel() > len(self._buffer):
            # Outside inference mode, because a tensor allocated in it is read-only outside.
            with torch.inference_mode(False):
                self._buffer = torch.empty(block.numel())
        return self._buffer[: block.numel()].view(block.shape).copy_(block)


def _blocks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row and the rows of each block of a weight."""
    height = max(1, BLOCK // weight.shape[1])
    for first in range(0, len(weight), height):
        yield first, weight[first : first + height]


def _finished(
    product: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Scale a product [rows, out] in place, add the bias, and return it contiguous in `dtype`."""
    product *= scales
    if bias is not None:
        product += bias
    return product.to(dtype).contiguous()
