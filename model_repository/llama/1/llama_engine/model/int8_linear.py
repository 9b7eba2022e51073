"""A linear layer over bitsandbytes' 8-bit weights that leaves the activations as they are.

bitsandbytes multiplies 8-bit weights with activations that it rounds to 8 bits for that (LLM.int8(), at every outlier
threshold). On a GPU that reaches the integer units; on a CPU it converts both back to floats, the whole matrix anew at
every call, and is slower than the float matrix it replaces. Here the weight is widened just before it is multiplied,
and the result is that of the weights alone, with nothing rounded but them. On a GPU that is the chosen kernels'
business; on a CPU the weight is widened block by block, into a scratch that stays in the processor's cache: memory is
read at one byte a weight.

Knows one matrix; which layers become such ones is the checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from llama_engine.kernels.selection import Int8Product, Kernels
from llama_engine.libraries import Linear8bitLt

BLOCK = 1 << 20
"""Weights widened at a time. 4 MiB in float32: smaller blocks cost calls, larger ones leave the cache (perf/LOG.md)."""

FEW = 64
"""Up to so many rows the product for few rows is taken, whatever the pass."""


class Int8Linear(Linear8bitLt):
    """y = x Wᵀ + b with W = weight · scales / 127, added up in float32. Not thread-safe: layers share a scratch.

    It is the layer that bitsandbytes made, weight and all, and is saved like it; only the product is another.
    """

    def __init__(self, layer: Linear8bitLt, few: Int8Product, many: Int8Product) -> None:
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
        assert isinstance(scales, torch.Tensor), "a weight that isn't quantized yet"
        self._scales = scales.float() / 127.0
        self._few, self._many = few, many

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features)
        # A decode step, one token a row, keeps to one product however many rows it has: changing it with their number
        # would change their results.
        few = rows.shape[0] <= FEW or activations.shape[-2] == 1
        product = (self._few if few else self._many)(rows, self.weight, self._scales, self.bias)
        return product.view(*activations.shape[:-1], self.out_features)


class Blockwise:
    """The products on a CPU, in float32; one for all layers of a model, because they share its scratch.

    What is on the left decides how a matrix library shares the work out among threads. With few rows that should be
    the weight, whose rows the threads have just widened and still have in their caches: two to three times as quick as
    the other way round at 2 to 64 rows, and slower from some hundreds on (perf/LOG.md).
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def few(
        self, activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return [rows, out] as `reference.int8_product` does; quick for a decode step's rows."""
        rows = activations.float().t()
        product = rows.new_empty(len(weight), rows.shape[1])
        for first, block in _blocks(weight):
            torch.mm(self._scratch.widen(block), rows, out=product[first : first + len(block)])
        return _finished(product.t(), scales, bias, activations.dtype)

    def many(
        self, activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the same; quick for a prompt's."""
        rows = activations.float()
        product = rows.new_empty(rows.shape[0], len(weight))
        for first, block in _blocks(weight):
            torch.mm(rows, self._scratch.widen(block).t(), out=product[:, first : first + len(block)])
        return _finished(product, scales, bias, activations.dtype)


def _blocks(weight: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the rows of a weight block by block, and the number of each block's first."""
    height = max(1, BLOCK // weight.shape[1])
    for first in range(0, len(weight), height):
        yield first, weight[first : first + height]


def _finished(
    product: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Scale a product [rows, out] in place, and return it row by row in memory."""
    product *= scales
    if bias is not None:
        product += bias
    return product.to(dtype).contiguous()


class Scratch:
    """The block that is being multiplied, widened; one for all layers of a model."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def widen(self, weight: torch.Tensor) -> torch.Tensor:
        """Return [rows, in] in float32; valid until the next call."""
        if weight.numel() > len(self._memory):
            # A tensor that is made in inference mode could only be written to in there.
            with torch.inference_mode(False):
                self._memory = torch.empty(weight.numel())
        widened = self._memory[: weight.numel()].view(weight.shape)
        return widened.copy_(weight)


def replace_int8_layers(model: torch.nn.Module, kernels: Kernels | None = None) -> None:
    """Put an Int8Linear in the place of every Linear8bitLt of a model; the weights are shared, not copied.

    kernels: whose products the layers take, which are there; None is what is best on a CPU.
    """
    blockwise = Blockwise()
    few, many = (blockwise.few, blockwise.many) if kernels is None else (kernels.few_rows, kernels.many_rows)
    assert few is not None, "there is no product to take"
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, Linear8bitLt):
                setattr(parent, name, Int8Linear(layer, few, many))
