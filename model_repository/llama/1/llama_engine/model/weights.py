"""Data classes for the weights of a Llama's layers, with q|k|v and gate|up fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearWeight:
    """The weights of a linear layer y = x Wᵀ + b.

    weight: [out, in], floats, or int8 with scales.
    scales: float32; None for floats. [out]: rows, W = scales · weight. [out, groups]: groups of in / groups consecutive
    columns, W = scales · weight + offsets.
    bias: [out] or None.
    offsets: [out, groups], float32, of groups whose range isn't symmetric; else None.
    bits: of the integers; 4: they lie in -8 … 7, and are stored as int8 here all the same.
    order: [in], int64: column c multiplies the input order[c]; None: input c. Only groups have an order.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    offsets: torch.Tensor | None = None
    bits: int = 8
    order: torch.Tensor | None = None

    @property
    def group_size(self) -> int | None:
        """Number of columns of a group; None for floats and rows."""
        return None if self.scales is None or self.scales.ndim == 1 else self.weight.shape[1] // self.scales.shape[1]

    def dequantized(self) -> torch.Tensor:
        """Return W [out, in], float32, with its columns in the order of the inputs."""
        if self.scales is None:
            return self.weight.float()
        groups = self.weight.float().view(len(self.weight), -1, self.group_size or self.weight.shape[1])
        result = groups * self.scales.view(len(self.weight), -1, 1)
        if self.offsets is not None:
            result += self.offsets[:, :, None]
        result = result.view(self.weight.shape)
        return result if self.order is None else result[:, self.order.argsort()]


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer.

    query_key_value: rows of all query heads, then key heads, then value heads. gate_up: rows of gate, then up.
    attention_norm, mlp_norm: [hidden], the gains of the RMSNorms before attention and MLP.
    """

    attention_norm: torch.Tensor
    query_key_value: LinearWeight
    attention_output: LinearWeight
    mlp_norm: torch.Tensor
    gate_up: LinearWeight
    down: LinearWeight
