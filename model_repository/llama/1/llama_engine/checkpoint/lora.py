"""LoRA adapters: what they add to a model's linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoraWeights:
    """What an adapter adds to a linear layer: y += scaling · (x · Aᵀ) · Bᵀ.

    a: [rank, in], b: [out, rank], both float32 or both bfloat16, contiguous and finite.
    """

    a: torch.Tensor
    b: torch.Tensor
    scaling: float


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter's weights.

    digest: SHA-256 of the scalings and tensors. rank: the largest. layers: for each decoder layer, the weights by the
    name of the linear layer, as in `checkpoint.tensor_names`.
    """

    digest: str
    rank: int
    layers: tuple[Mapping[str, LoraWeights], ...]
