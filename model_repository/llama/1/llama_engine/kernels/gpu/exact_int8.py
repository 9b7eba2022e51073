"""The exact INT8 product on a GPU, with bitsandbytes' INT8 matrix product, whose sums are int32.

A token's activations x are scale · q, and the integer q is one INT8 term or two:

    q = 254 · high + low        Σ x·w = scale · weight scale · (254 · Σ high·w + Σ low·w)

Integer sums are exact in any order, and all other operations are elementwise. So a token's result has the same bits in
any batch and for any chunking of a prompt, and, with as many terms, the same bits as the CPU's compiled kernels
(`cpu_reference.linear`).
This module has not run on a GPU yet; the tests run it on CPU tensors.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from bitsandbytes.functional import int8_linear_matmul
from torch.nn.functional import pad

from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError
from llama_engine.kernels.activation_terms import MAX_INPUTS
from llama_engine.kernels.gpu.elementwise import SEPARATE, Elementwise

MULTIPLE = 4
"""Divisor that cuBLASLt requires of a layer's inputs and outputs; for others bitsandbytes computes in float32, which
rounds. Outputs are padded."""

# bitsandbytes warns when cuBLASLt has no product for a shape and float32 takes its place.
warnings.filterwarnings("error", ".*falling back to fp32 matmul", RuntimeWarning)


@dataclass(frozen=True)
class ExactInt8Linear:
    """A linear layer y = x Wᵀ + b with exact integer sums, on the device of the weight.

    weight: [padded out, in], int8. scales: [padded out], float32, factor of each channel's integers. bias: [padded
    out], float32. outputs: number of outputs without the padding. terms: INT8 terms per activation, 1 or 2.
    elementwise: the operations before and after the product.
    """

    weight: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None
    outputs: int
    terms: int
    elementwise: Elementwise

    def __call__(self, activations: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., out] for activations [..., in], in their dtype; NaN for non-finite tokens."""
        flat = activations.reshape(-1, activations.shape[-1])
        terms, scale = self.elementwise.quantize(flat, self.terms)
        sums = int8_linear_matmul(terms, self.weight)
        result = self.elementwise.dequantize(sums, scale, self.scales, self.bias, activations.dtype, self.terms)
        return result[:, : self.outputs].view(*activations.shape[:-1], -1)


def exact_int8_linear(weight: LinearWeight, terms: int, elementwise: Elementwise = SEPARATE) -> ExactInt8Linear:
    """Return the layer of an INT8 weight. Raises CheckpointError if its number of inputs has no exact product."""
    assert weight.scales is not None, "the weight is not quantized"
    outputs, inputs = weight.weight.shape
    if inputs % MULTIPLE or inputs > MAX_INPUTS:
        raise CheckpointError(
            f"INT8 weights of {outputs} x {inputs} (outputs x inputs) have no exact product on a GPU: the inputs "
            f"must be a multiple of {MULTIPLE} and at most {MAX_INPUTS}"
        )
    integers, scales = weight.weight, weight.scales
    bias = None if weight.bias is None else weight.bias.float()
    # Pad only where it is needed, because it copies.
    if padding := -outputs % MULTIPLE:
        integers, scales = pad(integers, (0, 0, 0, padding)), pad(scales, (0, padding))
        bias = None if bias is None else pad(bias, (0, padding))
    return ExactInt8Linear(integers, scales, bias, outputs, terms, elementwise)
