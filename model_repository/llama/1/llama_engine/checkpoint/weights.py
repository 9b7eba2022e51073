"""The weights of linear layers, decoder layers, in which q|k|v and gate|up are fused, and the embedding matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

import torch

_Linear = TypeVar("_Linear")
_Converted = TypeVar("_Converted")


@dataclass(frozen=True)
class LinearWeight:
    """The weights of a linear layer y = x Wᵀ + b.

    weight: [out, in], floats, or int8 with scales.
    scales: float32; None for floats. [out]: per channel, W = scales · weight. [out, groups]: groups of in / groups
    consecutive columns, W = scales · weight + offsets. bias: [out] or None. offsets: [out, groups], float32, of groups
    whose range isn't symmetric; else None. bits: those of the integers. With 4 they lie in -8 … 7, and are stored as
    int8 here all the same. order: [in], int64: column c multiplies the input order[c]; None: input c. Only groups have
    an order.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    bits: int = 8
    order: torch.Tensor | None = None

    @property
    def group_size(self) -> int | None:
        """Number of columns of a group; None for floats and INT8 per channel."""
        return None if self.scales is None or self.scales.ndim == 1 else self.weight.shape[1] // self.scales.shape[1]

    def to(self, device: torch.device, bias: torch.Tensor | None) -> LinearWeight:
        """Return the layer on a device, with this bias."""
        scales, offsets, order = (
            None if tensor is None else tensor.to(device) for tensor in (self.scales, self.offsets, self.order)
        )
        return LinearWeight(self.weight.to(device), scales, bias, offsets, self.bits, order)

    def channels(self, channels: slice) -> LinearWeight:
        """Return these output channels of the layer, without bias."""
        scales, offsets = (None if tensor is None else tensor[channels] for tensor in (self.scales, self.offsets))
        return LinearWeight(self.weight[channels], scales, None, offsets, self.bits, self.order)

    def scaled(self, factor: float) -> LinearWeight:
        """Return the layer whose outputs are `factor` times this quantized one's."""
        offsets, bias = (None if tensor is None else tensor * factor for tensor in (self.offsets, self.bias))
        return replace(self, scales=_scales(self) * factor, offsets=offsets, bias=bias)

    def in_groups(self, size: int) -> LinearWeight:
        """Return the same integers in groups of `size` columns, a divisor of the group size; each repeats its scale."""
        columns = self.group_size or self.weight.shape[1]
        count, last = columns // size, self.weight.shape[1] // columns
        scales = _scales(self).view(-1, last).repeat_interleave(count, 1)
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(count, 1)
        return replace(self, scales=scales, offsets=offsets)

    def dequantized(self) -> torch.Tensor:
        """Return W [out, in], float32, with its columns in the order of the inputs."""
        if self.scales is None:
            return self.weight.float()
        result = self.weight.float().view(len(self.weight), -1, self.group_size or self.weight.shape[1])
        result *= self.scales.view(len(self.weight), -1, 1)
        if self.offsets is not None:
            result += self.offsets[:, :, None]
        result = result.view(self.weight.shape)
        return result if self.order is None else result[:, self.order.argsort()]


@dataclass(frozen=True)
class Embedding:
    """The embedding matrix of the CPU kernels, whose rows become float32 when they are looked up.

    rows: [vocabulary, hidden] in floats, or in bytes of a GGUF type, [vocabulary, bytes]. to_float32: returns rows as
    float32 [any, hidden].
    """

    rows: torch.Tensor
    to_float32: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float

    def look_up(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, [tokens], as float32 [tokens, hidden]."""
        return self.to_float32(self.rows[tokens])


def concatenated(parts: Sequence[LinearWeight]) -> LinearWeight:
    """Return the fused linear layer of layers with the same inputs, in floats or all quantized, without rounding.

    Parts that differ become 8-bit groups of the smallest group size if one does. Raises ValueError if the inputs'
    orders differ or the largest group isn't a multiple of the smallest.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    biases = [part.bias for part in parts if part.bias is not None]
    bias = torch.cat(biases) if biases else None
    weight = torch.cat([part.weight for part in parts])
    if any(part.scales is None for part in parts):
        return LinearWeight(weight, bias=bias)
    orders = [part.order for part in parts]
    if any((a is None) != (b is None) or (a is not None and b is not None and not torch.equal(a, b))
           for a, b in pairwise(orders)):  # fmt: skip
        raise ValueError("the layers take their inputs in different orders")
    sizes = [part.group_size for part in parts if part.group_size is not None]
    if not sizes:
        return LinearWeight(weight, torch.cat([_scales(part) for part in parts]), bias)
    columns, size = weight.shape[1], min(sizes)
    if any((part.group_size or columns) % size for part in parts):
        raise ValueError(f"groups of {sorted({*sizes})} columns aren't multiples of the smallest")
    grouped = [part.in_groups(size) for part in parts]
    offsets = None
    if any(part.offsets is not None for part in grouped):
        offsets = torch.cat(
            [torch.zeros_like(_scales(part)) if part.offsets is None else part.offsets for part in grouped]
        )
    scales = torch.cat([_scales(part) for part in grouped])
    return LinearWeight(weight, scales, bias, offsets, max(part.bits for part in parts), first.order)


def _scales(weight: LinearWeight) -> torch.Tensor:
    assert weight.scales is not None, "the weight is not quantized"
    return weight.scales


@dataclass(frozen=True)
class DecoderLayer(Generic[_Linear]):
    """One decoder layer, with linear layers of one type: its weights, what packs them, or what computes them.

    query_key_value: channels of all query heads, then key heads, then value heads. gate_up: those of gate, then up.
    attention_norm, mlp_norm: [hidden], gains of the RMSNorms before attention and MLP. attention_output_norm,
    mlp_output_norm: [hidden], gains of those after them. query_norm, key_norm: gains of those of query and key, [head
    dim] or [heads · head dim]. None is no norm. `Architecture` says which there are.
    """

    attention_norm: torch.Tensor | None
    query_key_value: _Linear
    attention_output: _Linear
    mlp_norm: torch.Tensor | None
    gate_up: _Linear
    down: _Linear
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    attention_output_norm: torch.Tensor | None = None
    mlp_output_norm: torch.Tensor | None = None

    def with_linears(self, convert: Callable[[_Linear], _Converted]) -> DecoderLayer[_Converted]:
        """Return the layer with the same norms and each of its linear layers converted."""
        return DecoderLayer(
            self.attention_norm,
            convert(self.query_key_value),
            convert(self.attention_output),
            self.mlp_norm,
            convert(self.gate_up),
            convert(self.down),
            self.query_norm,
            self.key_norm,
            self.attention_output_norm,
            self.mlp_output_norm,
        )


LayerWeights = DecoderLayer[LinearWeight]
