"""Packs the weights of a Llama into the layout of the CPU kernels.

All widths are padded with zeros to multiples of 64, and the head dimension to a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from llama_engine.kernels.cpu.library import CpuKernels
from llama_engine.kernels.cpu.structures import Matrix, Quantized
from llama_engine.model.weights import LayerWeights, LinearWeight

UNIT = 64
"""Padded widths are multiples of this."""

OUTPUTS = 16
"""Number of outputs per packed block."""

ROWS = 12
"""Row buffers are a multiple of this: whole groups of 6 rows (AVX2) and of 8 terms, with up to 2 terms per row."""

MAX_INPUTS = 2**31 // (127 * 128)
"""Maximum inputs of a layer, 132,104: a sum of this many products of a term and a weight always fits int32."""


def padded(size: int, unit: int = UNIT) -> int:
    """Return the size rounded up to a multiple of the unit."""
    return -(-size // unit) * unit


@dataclass(frozen=True)
class Dimensions:
    """A Llama's dimensions. epsilon: of the RMSNorms. scaling: factor of the attention scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    epsilon: float
    scaling: float

    @property
    def padded_head_dim(self) -> int:
        """The head dimension of packed weights and KV cache."""
        return padded(self.head_dim, 16)

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """The shapes (out, in) of the linear layers by name."""
        return {
            "query_key_value": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "attention_output": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocabulary, self.hidden),
        }


@dataclass(frozen=True)
class PackedLinear:
    """A packed linear layer; all tensors are padded. weight: uint8. scale: [outputs]. bias: [outputs] or None."""

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    @property
    def matrix(self) -> Matrix:
        """The C structure with pointers to the tensors, valid as long as this object exists."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return Matrix(self.weight.data_ptr(), self.scale.data_ptr(), bias, *self.weight.shape)


@dataclass(frozen=True)
class PackedLayer:
    """A packed decoder layer."""

    attention_norm: torch.Tensor
    query_key_value: PackedLinear
    attention_output: PackedLinear
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass
class QuantizedRows:
    """Scratch memory for a linear layer's quantized input rows.

    inputs: padded. limit: of the sum of a row's squared high terms (`ActivationTerms.limit`).
    """

    rows: int
    inputs: int
    limit: float
    tensors: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = (
            torch.zeros(padded(self.rows, ROWS), 2, self.inputs, dtype=torch.int8),
            torch.zeros(self.rows, dtype=torch.int32),
            torch.zeros(self.rows, dtype=torch.uint8),
            torch.zeros(self.rows),
            torch.zeros(self.rows),
            torch.zeros(self.rows, 2, dtype=torch.int32),
        )

    @property
    def structure(self) -> Quantized:
        """The C structure with pointers to the tensors, valid as long as this object exists."""
        return Quantized(*(tensor.data_ptr() for tensor in self.tensors), self.limit, self.inputs)


def pad_gain(gain: torch.Tensor) -> torch.Tensor:
    """Return a norm's gain [hidden] as float32, padded with zeros."""
    return functional.pad(gain.detach().float(), (0, padded(len(gain)) - len(gain))).contiguous()


def pack_linear(kernels: CpuKernels, linear: LinearWeight, source: torch.Tensor | None = None) -> PackedLinear:
    """Pack an INT8 linear layer. source: as for `CpuKernels.pack`; None keeps the order of the outputs.

    Raises ValueError for a weight in floats and for more than MAX_INPUTS inputs.
    """
    weight, scales = linear.weight, linear.scales
    if scales is None or weight.dtype != torch.int8:
        raise ValueError(f"a weight is {weight.dtype}, and the CPU kernels take int8 with scales")
    outputs, columns = weight.shape
    if columns > MAX_INPUTS:
        raise ValueError(f"a linear layer has {columns} inputs, and int32 sums are exact for up to {MAX_INPUTS}")
    if source is None:
        source = torch.arange(outputs)
    source = functional.pad(source, (0, padded(len(source)) - len(source)), value=-1)

    def arrange(values: torch.Tensor) -> torch.Tensor:
        return torch.where(source < 0, 0.0, values.detach().float()[source.clamp(min=0)]).contiguous()

    return PackedLinear(
        weight=kernels.pack(weight.detach().contiguous(), source.to(torch.int32), padded(columns)),
        scale=arrange(scales),
        bias=None if linear.bias is None else arrange(linear.bias),
    )


def pack_layer(kernels: CpuKernels, dimensions: Dimensions, layer: LayerWeights) -> PackedLayer:
    """Pack a decoder layer. The result has no reference to the original weights."""
    heads, dim, wide = dimensions.heads, dimensions.head_dim, dimensions.padded_head_dim
    output = layer.attention_output
    if wide != dim:
        split = output.weight.view(len(output.weight), heads, dim)
        output = LinearWeight(functional.pad(split, (0, wide - dim)).flatten(1), output.scales, output.bias)
    return PackedLayer(
        attention_norm=pad_gain(layer.attention_norm),
        query_key_value=pack_linear(kernels, layer.query_key_value, _head_rows(dimensions)),
        attention_output=pack_linear(kernels, output),
        mlp_norm=pad_gain(layer.mlp_norm),
        gate_up=pack_linear(kernels, layer.gate_up, _gate_up_rows(dimensions.intermediate)),
        down=pack_linear(kernels, layer.down),
    )


def _head_rows(dimensions: Dimensions) -> torch.Tensor:
    """Return the source rows for packing q|k|v with each head padded; -1 is padding."""
    dim = dimensions.head_dim
    rows = torch.arange((dimensions.heads + 2 * dimensions.kv_heads) * dim).view(-1, dim)
    return functional.pad(rows, (0, dimensions.padded_head_dim - dim), value=-1).flatten()


def _gate_up_rows(intermediate: int) -> torch.Tensor:
    """Return the source rows for packing gate|up in alternating blocks of 16 outputs."""
    gate = functional.pad(torch.arange(intermediate), (0, padded(intermediate) - intermediate), value=-1)
    up = torch.where(gate < 0, -1, gate + intermediate)
    return torch.stack((gate.view(-1, OUTPUTS), up.view(-1, OUTPUTS)), dim=1).flatten()
