"""A linear layer over bitsandbytes' 8-bit weights on a GPU that does not round the activations.

bitsandbytes rounds activations to 8 bits for its 8-bit product (LLM.int8(), at every outlier threshold). Int8Linear
widens the weight inside the fused kernel instead, or before the product of a prefill.
"""

from __future__ import annotations

import torch
from bitsandbytes.nn.modules import Linear8bitLt

from llama_engine.kernels.gpu.gpu_kernels import Int8Product, Kernels

MIN_MANY_ROWS = 65
"""Rows from which the product for many rows is used, unless a decode step has as many slots."""


class Int8Linear(Linear8bitLt):
    """y = x Wᵀ + b with W = weight · scales / 127, accumulated in float32.

    Takes over weight and state of a bitsandbytes layer and is saved like it; only the product differs.
    """

    def __init__(self, layer: Linear8bitLt, few_rows: Int8Product, many_rows: Int8Product, slots: int = 0) -> None:
        """slots: maximum rows of a decode step, where they are known."""
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
        self._min_many_rows = max(MIN_MANY_ROWS, slots + 1)

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features)
        # A decode step uses the same product for any number of rows: a switch would change results.
        multiply = self._many_rows if len(rows) >= self._min_many_rows else self._few_rows
        product = multiply(rows, self.weight, self._scales, self.bias)
        return product.view(*activations.shape[:-1], self.out_features)


def replace_int8_layers(model: torch.nn.Module, kernels: Kernels, slots: int = 0) -> None:
    """Replace every Linear8bitLt of a model by an Int8Linear; the weights are shared, not copied.

    kernels: whose products the layers use, with `few_rows` set. slots: maximum rows of a decode step, where known.
    """
    assert kernels.few_rows is not None, "the kernels have no 8-bit product"
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, Linear8bitLt):
                setattr(parent, name, Int8Linear(layer, kernels.few_rows, kernels.many_rows, slots))
