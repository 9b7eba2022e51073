"""A linear layer over bitsandbytes' 8-bit weights that does not round the activations.

bitsandbytes rounds activations to 8 bits for its 8-bit product (LLM.int8(), at every outlier threshold). On a GPU this
uses the integer units; on a CPU it converts both operands back to floats, the whole matrix at every call, and is slower
than the float matrix it replaces. Int8Linear widens the weight just before the product instead. On a GPU the selected
kernels do that; on a CPU the weight is widened block by block into a buffer that stays in the processor's cache, so
memory is read at one byte per weight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llama_engine.kernels.selection import Int8Product, Kernels
from llama_engine.libraries import Linear8bitLt

BLOCK = 1 << 20
"""Weights per block, 4 MiB in float32: smaller blocks cost calls, larger ones fall out of the cache (perf/LOG.md)."""

FEW_ROWS = 64
"""Rows up to which a prefill uses the product for few rows, too."""


class Int8Linear(Linear8bitLt):
    """y = x Wᵀ + b with W = weight · scales / 127, accumulated in float32. Not thread-safe: layers share a buffer.

    Takes over weight and state of a bitsandbytes layer and is saved like it; only the product differs.
    """

    def __init__(self, layer: Linear8bitLt, few_rows: Int8Product, many_rows: Int8Product) -> None:
        super().__init__(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            has_fp16_weights=False,
            threshold=layer.state.threshold,
            device=torch.device("meta"),
        )
        # weight: [out, in], int8; its SCB: [out], float32, the largest absolute value of each row.
        self.weight, self.bias, self.state = layer.weight, layer.bias, layer.state
        scales = getattr(layer.weight, "SCB", None)
        assert isinstance(scales, torch.Tensor), "the weight is not quantized yet"
        self._scales = scales.float() / 127.0
        self._few_rows, self._many_rows = few_rows, many_rows

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features)
        # A decode step (one token per row) uses the same product for any number of rows: a switch would change results.
        few = rows.shape[0] <= FEW_ROWS or activations.shape[-2] == 1
        product = (self._few_rows if few else self._many_rows)(rows, self.weight, self._scales, self.bias)
        return product.view(*activations.shape[:-1], self.out_features)


class BlockwiseProduct:
    """The products on a CPU, in float32; one instance for all layers of a model, which share its buffer.

    The left operand decides how the matrix library distributes work over threads. With few rows it should be the
    weight, whose rows the threads have just widened and still have in their caches: two to three times as fast as the
    other order at 2 to 64 rows, and slower from some hundreds on (perf/LOG.md).
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


def replace_int8_layers(model: torch.nn.Module, kernels: Kernels | None = None) -> None:
    """Replace every Linear8bitLt of a model by an Int8Linear; the weights are shared, not copied.

    kernels: whose products the layers use, with `few_rows` set; None is the CPU's blockwise products.
    """
    products = BlockwiseProduct() if kernels is None else kernels
    few_rows, many_rows = products.few_rows, products.many_rows
    assert few_rows is not None, "the kernels have no 8-bit product"
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, Linear8bitLt):
                setattr(parent, name, Int8Linear(layer, few_rows, many_rows))
