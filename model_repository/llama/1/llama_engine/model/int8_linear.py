"""A linear layer over bitsandbytes' 8-bit weights that does not round the activations.

bitsandbytes rounds activations to 8 bits for its 8-bit product (LLM.int8(), at every outlier threshold). On a GPU this
uses the integer units; on a CPU it converts both operands back to floats, the whole matrix at every call, and is slower
than the float matrix it replaces. Int8Linear widens the weight just before the product instead: on a GPU in the
selected kernels, on a CPU in `widened_product`.
"""

from __future__ import annotations

import torch

from llama_engine.kernels.gpu.gpu_kernels import Int8Product, Kernels
from llama_engine.libraries import Linear8bitLt
from llama_engine.model.widened_product import BlockwiseProduct

FEW_ROWS = 64
"""Rows up to which the product for few rows is used, and for a decode step of more slots up to their number."""


class Int8Linear(Linear8bitLt):
    """y = x Wᵀ + b with W = weight · scales / 127, accumulated in float32. Not thread-safe: layers share a buffer.

    Takes over weight and state of a bitsandbytes layer and is saved like it; only the product differs.
    """

    def __init__(self, layer: Linear8bitLt, few_rows: Int8Product, many_rows: Int8Product, slots: int = 0) -> None:
        """slots: most rows of a decode step, where they are known."""
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
        self._most_few_rows = max(FEW_ROWS, slots)

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features)
        # A decode step uses the same product for any number of rows: a switch would change results.
        few = rows.shape[0] <= self._most_few_rows
        product = (self._few_rows if few else self._many_rows)(rows, self.weight, self._scales, self.bias)
        return product.view(*activations.shape[:-1], self.out_features)


def replace_int8_layers(model: torch.nn.Module, kernels: Kernels | None = None, slots: int = 0) -> None:
    """Replace every Linear8bitLt of a model by an Int8Linear; the weights are shared, not copied.

    kernels: whose products the layers use, with `few_rows` set; None is the CPU's blockwise products. slots: most rows
    of a decode step, where they are known.
    """
    products = BlockwiseProduct() if kernels is None else kernels
    few_rows, many_rows = products.few_rows, products.many_rows
    assert few_rows is not None, "the kernels have no 8-bit product"
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, Linear8bitLt):
                setattr(parent, name, Int8Linear(layer, few_rows, many_rows, slots))
