"""Packs the weights of a Llama into the layout of the CPU kernels.

All widths are padded with zeros to multiples of 64, and the head dimension to a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch.nn import functional

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.per_channel import requantized
from llama_engine.checkpoint.weights import DecoderLayer, LayerWeights, LinearWeight
from llama_engine.kernels.activation_terms import MAX_INPUTS, ActivationTerms
from llama_engine.kernels.cpu.bindings import CpuKernels, Matrix, Quantized, address_of

UNIT = 64
"""Padded widths are multiples of this."""

OUTPUTS = 16
"""Number of outputs per packed block."""

TOKEN_MULTIPLE = 24
"""Buffers have a multiple of this many tokens: whole blocks of 6 tokens (AVX2) and of 8 (AVX512-VNNI)."""

QUAD = 4
"""Adjacent columns of which high terms are multiplied together."""

GROUP_UNIT = 32
"""A column group is a multiple of this."""

MAX_GROUP = 512
"""Maximum columns of a group: a sum of this many products of a term and a weight is below 2²⁴, exact in float32."""


def padded(size: int, unit: int = UNIT) -> int:
    """Return the size rounded up to a multiple of the unit."""
    return -(-size // unit) * unit


def padded_head_dim(architecture: Architecture) -> int:
    """Return the head dimension of packed weights and KV cache."""
    return padded(architecture.head_dim, 16)


def linear_shapes(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """Return the shapes (out, in) of the linear layers by name."""
    width, hidden, inner = architecture.heads * architecture.head_dim, architecture.hidden, architecture.intermediate
    return {
        "query_key_value": (width + 2 * architecture.kv_heads * architecture.head_dim, hidden),
        "attention_output": (hidden, width),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
        "head": (architecture.vocabulary, hidden),
    }


@dataclass(frozen=True)
class PackedLinear:
    """A packed linear layer; all tensors are padded.

    matrix: the C structure with pointers to the tensors, valid as long as this object exists. weight: uint8. scale:
    [outputs]; None for groups. bias: [outputs] or None. order: [columns] int32 or None.
    """

    matrix: Matrix
    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    order: torch.Tensor | None = None


PackedLayer = DecoderLayer[PackedLinear]
"""A packed decoder layer; its gains are padded."""


@dataclass
class QuantizedTokens:
    """Scratch memory for a linear layer's quantized input.

    width: padded number of inputs. inputs: their number without padding.
    """

    tokens: int
    width: int
    inputs: int
    terms: ActivationTerms
    tensors: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        whole, width = padded(self.tokens, TOKEN_MULTIPLE), self.width
        self.tensors = (
            torch.zeros(whole, 2, width, dtype=torch.int8),
            torch.zeros(self.tokens, dtype=torch.int32),
            torch.zeros(whole, width // QUAD, dtype=torch.int32),
            torch.zeros(whole, width // QUAD, dtype=torch.int32),
            torch.zeros(self.tokens),
            torch.zeros(self.tokens, 2, dtype=torch.int32),
            torch.zeros(whole, width // GROUP_UNIT, dtype=torch.int32),
            torch.zeros(whole, width // GROUP_UNIT),
        )

    @property
    def structure(self) -> Quantized:
        """The C structure with pointers to the tensors, valid as long as this object exists."""
        pointers = (tensor.data_ptr() for tensor in self.tensors)
        ratio = self.terms.outlier_ratio
        return Quantized(*pointers, ratio, ratio / self.inputs, self.width)


def pad_gain(gain: torch.Tensor) -> torch.Tensor:
    """Return a norm's gain [hidden] as float32, padded with zeros."""
    return functional.pad(gain.detach().float(), (0, padded(len(gain)) - len(gain))).contiguous()


def _pad(gain: torch.Tensor | None) -> torch.Tensor | None:
    return None if gain is None else pad_gain(gain)


def _pad_heads(architecture: Architecture, gain: torch.Tensor | None) -> torch.Tensor | None:
    """Return the gain [head dim] or [heads · head dim] of a norm of heads, with each head padded with zeros."""
    if gain is None:
        return None
    padding = padded_head_dim(architecture) - architecture.head_dim
    return functional.pad(gain.detach().float().view(-1, architecture.head_dim), (0, padding)).flatten()


def pack_linear(kernels: CpuKernels, linear: LinearWeight, source: torch.Tensor | None = None) -> PackedLinear:
    """Pack a linear layer of 8 or 4 bits. source: see `CpuKernels.pack`; None keeps the order of the outputs.

    Raises ValueError for a weight in floats, for more than MAX_INPUTS inputs, for groups of another size than a
    multiple of GROUP_UNIT up to MAX_GROUP and for an order that isn't a permutation of the inputs.
    """
    weight, scales = linear.weight, linear.scales
    if scales is None or weight.dtype != torch.int8:
        raise ValueError(f"a weight is {weight.dtype}, and the CPU kernels take int8 with scales")
    outputs, columns = weight.shape
    if columns > MAX_INPUTS:
        raise ValueError(f"a linear layer has {columns} inputs, and int32 sums are exact for up to {MAX_INPUTS}")
    if source is None:
        source = torch.arange(outputs)

    source = pad_channels(source).to(torch.int32)

    def arrange(values: torch.Tensor) -> torch.Tensor:
        return torch.where(source < 0, 0.0, values.detach().float()[source.clamp(min=0)]).contiguous()

    bias = None if linear.bias is None else arrange(linear.bias)
    matrix = Matrix(bias=address_of(bias), outputs=len(source), inputs=padded(columns))
    if linear.group_size is not None:
        return _pack_groups(kernels, linear, source, matrix, bias)
    packed, scale = kernels.pack(weight.detach().contiguous(), source, padded(columns)), arrange(scales)
    matrix.weight, matrix.scale = packed.data_ptr(), scale.data_ptr()
    return PackedLinear(matrix, packed, scale, bias)


def _pack_groups(
    kernels: CpuKernels, linear: LinearWeight, source: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None
) -> PackedLinear:
    """Pack a layer in groups of columns. source: padded. matrix: gets the rest of its fields here."""
    assert linear.scales is not None
    columns, (groups, size) = linear.weight.shape[1], (linear.scales.shape[1], linear.group_size or 0)
    if groups * size != columns or size % GROUP_UNIT or size > MAX_GROUP:
        raise ValueError(f"a weight of {columns} columns has {groups} groups, and the CPU kernels take groups of a "
                         f"multiple of {GROUP_UNIT} columns up to {MAX_GROUP}")  # fmt: skip
    if linear.order is not None and not torch.equal(linear.order.sort().values, torch.arange(columns)):
        raise ValueError(f"the order of a weight's {columns} columns isn't a permutation")
    scales = linear.scales.detach().float().contiguous()
    offsets = None if linear.offsets is None else linear.offsets.detach().float().contiguous()
    order = None if linear.order is None else linear.order.to(torch.int32).contiguous()
    matrix.groups, matrix.group_size, matrix.bits, matrix.has_offsets = groups, size, linear.bits, offsets is not None
    packed = kernels.pack_groups(matrix, linear.weight.detach().contiguous(), scales, offsets, source)
    matrix.weight, matrix.order = packed.data_ptr(), address_of(order)
    return PackedLinear(matrix, packed, None, bias, order)


def pack_layer(kernels: CpuKernels, architecture: Architecture, layer: LayerWeights) -> PackedLayer:
    """Pack a decoder layer, with the residual scale in what it scales.

    The result has no reference to the original weights.
    """
    heads, dim, wide = architecture.heads, architecture.head_dim, padded_head_dim(architecture)
    output = layer.attention_output
    if wide != dim:
        # Padding would move the borders of groups.
        output = requantized(output)
        split = output.weight.view(len(output.weight), heads, dim)
        output = LinearWeight(functional.pad(split, (0, wide - dim)).flatten(1), output.scales, output.bias)
    scale, down = architecture.residual_scale, layer.down
    attention_output_norm, mlp_output_norm = layer.attention_output_norm, layer.mlp_output_norm
    if scale != 1 and attention_output_norm is not None and mlp_output_norm is not None:
        attention_output_norm, mlp_output_norm = attention_output_norm * scale, mlp_output_norm * scale
    elif scale != 1:
        output, down = output.scaled(scale), down.scaled(scale)
    sources = linear_sources(architecture)
    return PackedLayer(
        attention_norm=_pad(layer.attention_norm),
        query_key_value=pack_linear(kernels, layer.query_key_value, sources["query_key_value"][0]),
        attention_output=pack_linear(kernels, output),
        mlp_norm=_pad(layer.mlp_norm),
        gate_up=pack_linear(kernels, layer.gate_up, sources["gate_up"][0]),
        down=pack_linear(kernels, down),
        query_norm=_pad_heads(architecture, layer.query_norm),
        key_norm=_pad_heads(architecture, layer.key_norm),
        attention_output_norm=_pad(attention_output_norm),
        mlp_output_norm=_pad(mlp_output_norm),
    )


def pack_head(kernels: CpuKernels, architecture: Architecture, head: LinearWeight) -> PackedLinear:
    """Pack the output projection, with the logits' scale."""
    return pack_linear(kernels, head if architecture.logits_scale == 1 else head.scaled(architecture.logits_scale))


def output_scale(architecture: Architecture) -> float:
    """Return the factor in the packed layers attention_output and down.

    It is the residual scale, or 1 where a norm after the layer takes it instead.
    """
    return 1.0 if architecture.norm_after else architecture.residual_scale


def pad_channels(channels: torch.Tensor) -> torch.Tensor:
    """Return channels, padded with -1."""
    return functional.pad(channels, (0, padded(len(channels)) - len(channels)), value=-1)


def linear_sources(architecture: Architecture) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the channels that the packed outputs and inputs of each linear layer have; -1 is padding."""
    hidden, inner = _all_channels(architecture.hidden), _all_channels(architecture.intermediate)
    queries, keys = architecture.heads, architecture.kv_heads
    return {
        "query_key_value": (pad_channels(_head_channels(architecture, queries + 2 * keys)), hidden),
        "attention_output": (hidden, pad_channels(_head_channels(architecture, queries))),
        "gate_up": (_gate_up_channels(architecture.intermediate), hidden),
        "down": (hidden, inner),
    }


def _all_channels(size: int) -> torch.Tensor:
    return pad_channels(torch.arange(size))


def _head_channels(architecture: Architecture, heads: int) -> torch.Tensor:
    """Return the source channels for packing this number of heads, each of them padded; -1 is padding."""
    dim = architecture.head_dim
    channels = torch.arange(heads * dim).view(-1, dim)
    return functional.pad(channels, (0, padded_head_dim(architecture) - dim), value=-1).flatten()


def _gate_up_channels(intermediate: int) -> torch.Tensor:
    """Return the source channels for packing gate|up in alternating blocks of 16 outputs."""
    gate = pad_channels(torch.arange(intermediate))
    up = torch.where(gate < 0, -1, gate + intermediate)
    return torch.stack((gate.view(-1, OUTPUTS), up.view(-1, OUTPUTS)), dim=1).flatten()
