"""A linear layer over bitsandbytes' 8-bit weights that leaves the activations as they are.

bitsandbytes multiplies 8-bit weights with activations that it rounds to 8 bits for that (LLM.int8(), at every outlier
threshold). On a GPU that reaches the integer units; on a CPU it converts both back to floats, the whole matrix anew at
every call, and is slower than the float matrix it replaces. Here the weight is widened to float32 block by block, into
a scratch that stays in the processor's cache, and multiplied at once: memory is read at one byte a weight, and the
result is that of the weights alone, with nothing rounded but them.

Knows one matrix; which layers become such ones is the checkpoint's business.
"""

from __future__ import annotations

import torch
from bitsandbytes.nn.modules import Linear8bitLt

BLOCK = 1 << 20
"""Weights widened at a time. 4 MiB in float32: smaller blocks cost calls, larger ones leave the cache (perf/LOG.md)."""


class Int8Linear(Linear8bitLt):
    """y = x Wᵀ + b with W = weight · scales / 127, in float32. Not thread-safe: layers share the scratch.

    It is the layer that bitsandbytes made, weight and all, and is saved like it; only the product is another.
    """

    def __init__(self, layer: Linear8bitLt, scratch: Scratch) -> None:
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
        self._scratch = scratch

    def forward(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations."""
        rows = activations.reshape(-1, self.in_features).float()
        product = rows.new_empty(rows.shape[0], self.out_features)
        height = max(1, BLOCK // self.in_features)
        for first in range(0, self.out_features, height):
            weight = self.weight[first : first + height]
            torch.mm(rows, self._scratch.widen(weight).t(), out=product[:, first : first + weight.shape[0]])
        product *= self._scales
        if self.bias is not None:
            product += self.bias
        return product.to(activations.dtype).view(*activations.shape[:-1], self.out_features)


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


def leave_activations_unrounded(model: torch.nn.Module) -> None:
    """Put an Int8Linear in the place of every Linear8bitLt of a model on a CPU; the weights are shared, not copied."""
    scratch = Scratch()
    for parent in [*model.modules()]:
        for name, layer in parent.named_children():
            if isinstance(layer, Linear8bitLt):
                setattr(parent, name, Int8Linear(layer, scratch))
