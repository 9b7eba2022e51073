"""Quantizes linear layers by rounding to nearest, in the layouts of the quantizers' libraries.

The layouts are those of auto-gptq 0.7.1 (`qlinear_cuda.QuantLinear.pack`), GPTQModel 7.7 (gptq_v2), AutoAWQ 0.2.9
(`WQLinear_GEMM.from_linear`), compressed-tensors 0.20 (`pack_to_int32`) and transformers 5.23 (`Fp8Quantize`). The
tensors written here have been compared with those of the first four, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensors = dict[str, torch.Tensor]
"""The tensors of a saved layer, by their names' last part."""

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


@dataclass(frozen=True)
class Quantized:
    """A layer in groups of columns: W = scales · (integers - zeros).

    integers: [out, in], from 0. scales, zeros: [out, groups]. groups: [in], the group of each column.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor
    bits: int

    def dequantized(self) -> torch.Tensor:
        """W, float32, each weight rounded once."""
        return self.scales.float()[:, self.groups] * (self.integers - self.zeros[:, self.groups])


def quantize(
    weight: torch.Tensor,
    bits: int,
    size: int = -1,
    symmetric: bool = True,
    groups: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float16,
) -> Quantized:
    """Quantize a matrix in groups of `size` consecutive columns, -1 for rows, or in those of `groups`."""
    columns = weight.shape[1]
    if groups is None:
        groups = torch.arange(columns) // (columns if size == -1 else size)
    largest, centre = (1 << bits) - 1, 1 << (bits - 1)
    members = [weight.float()[:, groups == group] for group in range(int(groups.max()) + 1)]
    low = torch.stack([columns.amin(1).clamp(max=0) for columns in members], 1)
    high = torch.stack([columns.amax(1).clamp(min=0) for columns in members], 1)
    if symmetric:
        scales = (torch.maximum(-low, high) / (centre - 0.5)).to(dtype)
        zeros = torch.full(scales.shape, centre)
    else:
        scales = ((high - low) / largest).to(dtype)
        zeros = (-low / scales.float()).round().int().clamp(0, largest)
    steps = (weight.float() / scales.float()[:, groups]).round().int()
    return Quantized((steps + zeros[:, groups]).clamp(0, largest), scales, zeros, groups, bits)


def pack(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack integers from 0 along the last dimension into int32, lowest bits first."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(integers.long(), (0, -integers.shape[-1] % per_word))
    words = (padded.view(len(padded), -1, per_word) << (bits * torch.arange(per_word))).sum(-1)
    return torch.where(words < 1 << 31, words, words - (1 << 32)).int()


def gptq(layer: Quantized, layout: str = "gptq") -> Tensors:
    """`gptq` saves each zero point less 1, modulo 2^32 of the word."""
    zeros = pack(layer.zeros.t(), layer.bits)
    return {
        "qweight": pack(layer.integers, layer.bits).t().contiguous(),
        "qzeros": zeros - (0x11111111 if layer.bits == 4 else 0x01010101) if layout == "gptq" else zeros,
        "scales": layer.scales.t().contiguous(),
        "g_idx": layer.groups.int(),
    }


def awq(layer: Quantized) -> Tensors:
    """Pack along the outputs, whose order within a word is AWQ_ORDER."""

    def pack_outputs(values: torch.Tensor) -> torch.Tensor:
        return pack(values.t().reshape(values.shape[1], -1, 8)[..., AWQ_ORDER].flatten(-2), 4)

    tensors = {"qweight": pack_outputs(layer.integers), "qzeros": pack_outputs(layer.zeros)}
    return {**tensors, "scales": layer.scales.t().contiguous()}


def pack_quantized(layer: Quantized, symmetric: bool = True, ordered: bool = False) -> Tensors:
    """compressed-tensors' pack-quantized. ordered: with the group of each column."""
    tensors = {
        "weight_packed": pack(layer.integers, layer.bits),
        "weight_scale": layer.scales,
        "weight_shape": torch.tensor(layer.integers.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = pack(layer.zeros.t(), layer.bits).t().contiguous()
    return {**tensors, "weight_g_idx": layer.groups.int()} if ordered else tensors


def int_quantized(layer: Quantized, symmetric: bool = True) -> Tensors:
    """compressed-tensors' int-quantized, of 8 bits."""
    tensors = {"weight": (layer.integers - 128).to(torch.int8), "weight_scale": layer.scales}
    return tensors if symmetric else {**tensors, "weight_zero_point": (layer.zeros - 128).to(torch.int8)}


def fp8(weight: torch.Tensor, block: tuple[int, int], scale_name: str = "weight_scale") -> Tensors:
    """FP8 with a scale per block of rows and columns. A scale of the whole matrix has one dimension."""
    (rows, columns), (height, width) = weight.shape, block
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % width, 0, -rows % height))
    blocks = padded.view(-(-rows // height), height, -1, width)
    scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    floats = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return {"weight": floats, scale_name: scales.view(-1) if scales.numel() == 1 else scales}
