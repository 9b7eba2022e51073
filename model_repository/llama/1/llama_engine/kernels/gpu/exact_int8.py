"""The exact INT8 product on a GPU, by bitsandbytes' product of INT8 matrices, whose sums are int32.

An activation row x is scale · q, and the integer q is one INT8 term or two:

    q = 254 · high + low        Σ x·w = scale · weight scale · (254 · Σ high·w + Σ low·w)

Integer sums have neither rounding nor order, and everything else is elementwise. So a row's result has the same bits in
any batch and in any cut of a prompt, and they are the bits of the CPU's compiled kernels (`cpu_reference.linear`). It
has not run on a GPU yet; the tests run it on CPU tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bitsandbytes.functional import int8_linear_matmul

from llama_engine.errors import CheckpointError
from llama_engine.model.weights import LinearWeight

MAX_INPUTS = (2**31 - 1) // (127 * 128)
"""Inputs of a layer up to which no sum leaves int32, for any INT8 weights: 132,104."""

INPUT_MULTIPLE = 4
"""bitsandbytes multiplies other numbers of inputs in float32, which rounds."""

_SPLIT = 254
_SMALLEST = 1e-30
"""Rows without a larger value are quantized to zeros."""


@dataclass(frozen=True)
class ExactInt8Linear:
    """y = x Wᵀ + b in exact integer sums, on the device of the weight.

    weight: [out, in], int8. scales: [out], float32, the value of 1 in each row. bias: [out], float32. terms: 1 or 2, of
    an activation.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    terms: int

    def __call__(self, activations: torch.Tensor) -> torch.Tensor:
        """Return [..., out] of [..., in], in the dtype of the activations; NaN for a row that isn't finite."""
        terms, scale = quantize(activations.reshape(-1, activations.shape[-1]).float(), self.terms)
        sums: torch.Tensor = int8_linear_matmul(terms, self.weight)
        if self.terms == 2:
            high, low = sums.chunk(2)
            # Exact in float64, and then rounded once.
            sums = low.double().add_(high, alpha=_SPLIT)
        result: torch.Tensor = sums.float().mul_(scale * self.scales)
        if self.bias is not None:
            result.add_(self.bias)
        return result.to(activations.dtype).view(*activations.shape[:-1], -1)


def exact_int8_linear(weight: LinearWeight, terms: int) -> ExactInt8Linear:
    """Return the layer of a weight. Raises CheckpointError for a number of inputs whose sums aren't exact."""
    assert weight.scales is not None, "the weight is not quantized"
    outputs, inputs = weight.weight.shape
    if inputs % INPUT_MULTIPLE or inputs > MAX_INPUTS:
        raise CheckpointError(
            f"INT8 weights of {outputs} x {inputs} (outputs x inputs) have no exact product on a GPU: the inputs "
            f"must be a multiple of {INPUT_MULTIPLE} and at most {MAX_INPUTS}"
        )
    bias = None if weight.bias is None else weight.bias.float()
    return ExactInt8Linear(weight.weight, weight.scales.float() / 127, bias, terms)


def quantize(rows: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [n, in], float32; return their terms [terms · n, in], int8, all high ones first, and scales [n, 1].

    The scale of a row that isn't finite is NaN.
    """
    largest = rows.abs().amax(-1, keepdim=True)
    # Not `127 / largest`, which torch rounds twice, as 127 · (1 / largest).
    scaled = rows * torch.where(largest > _SMALLEST, torch.full_like(largest, 127) / largest, 0)
    high = scaled.round()
    # 0 · infinity is NaN.
    scale = (largest + 0 * largest) / 127
    if terms == 1:
        return high.to(torch.int8), scale
    low = ((scaled - high) * _SPLIT).round()
    return torch.cat((high, low)).to(torch.int8), scale / _SPLIT
