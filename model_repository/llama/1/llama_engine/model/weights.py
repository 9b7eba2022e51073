"""Data classes for the weights of a Llama's layers, with q|k|v and gate|up fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LinearWeight:
    """The weights of a linear layer y = x Wᵀ + b.

    weight: [out, in], floats, or int8 with W = weight · scales / 127. scales: [out], float32, the largest absolute
    value of each row (bitsandbytes' SCB); None for floats. bias: [out] or None.
    """

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None


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
