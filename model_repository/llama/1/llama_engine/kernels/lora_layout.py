"""How many LoRA adapters a model runner holds, and where their parts lie in its fused linear layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.lora import LoraWeights
from llama_engine.checkpoint.tensor_names import layer_linears


@dataclass(frozen=True)
class LoraLimits:
    """The adapters that a model runner has room for. count: their number; 0 is none. rank: their largest rank."""

    count: int
    rank: int


NO_LORAS = LoraLimits(0, 0)


class LoraPart(NamedTuple):
    """An adapter's weights for one of the linear layers that a field of `DecoderLayer` fuses.

    first_output: its first channel in the fused layer. first_rank: the sum of the ranks of the parts before it.
    """

    weights: LoraWeights
    first_output: int
    first_rank: int


def lora_parts(architecture: Architecture, layer: Mapping[str, LoraWeights]) -> dict[str, list[LoraPart]]:
    """Return an adapter's parts of a decoder layer by field of `DecoderLayer`. layer: its weights by name."""
    parts: dict[str, list[LoraPart]] = {}
    for field, linears in layer_linears(architecture).items():
        outputs = accumulate((linear.shape[0] for linear in linears), initial=0)
        rank, parts[field] = 0, []
        for linear, first in zip(linears, outputs, strict=False):
            if (weights := layer.get(linear.name)) is not None:
                parts[field].append(LoraPart(weights, first, rank))
                rank += len(weights.a)
    return parts
