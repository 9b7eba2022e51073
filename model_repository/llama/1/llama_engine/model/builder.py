"""Builds a `Llama` layer by layer from a checkpoint's weights.

Each layer is packed before the next one is read, so that peak memory exceeds the finished model by one layer only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import torch
from torch.nn import functional

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.rope import RopeTables
from llama_engine.checkpoint.weight_reader import WeightReader
from llama_engine.checkpoint.weights import LayerWeights, LinearWeight
from llama_engine.model.llama import Layer, Linear, Llama

_Packed = TypeVar("_Packed")

PackLinear = Callable[[LinearWeight], Linear]
"""Convert a weight into a linear layer. The caller holds the only reference, so that the weight can then be freed."""


@dataclass
class ReadWeights:
    """Counts the weights of a checkpoint while they are read.

    convert: returns the linear weight that is served instead of the one that was read. linears: number of linear layers
    by weight dtype. bytes: size of all weights.
    """

    convert: Callable[[LinearWeight], LinearWeight] = lambda weight: weight
    linears: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    _seen: set[int] = field(default_factory=set)

    def linear(self, weight: LinearWeight, fused: int = 1) -> LinearWeight:
        """Convert and count the weight of `fused` fused linear layers, and return it."""
        weight = self.convert(weight)
        kind = str(weight.weight.dtype).removeprefix("torch.")
        self.linears[kind if weight.scales is None else f"int{weight.bits}"] += fused
        for tensor in (weight.scales, weight.offsets, weight.order, weight.bias):
            if tensor is not None:
                self.tensor(tensor)
        if weight.bits == 8:
            self.tensor(weight.weight)
        else:
            self.bytes += weight.weight.numel() * weight.bits // 8
        return weight

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count the bytes of a tensor and return it. Tensors passed to `keep` before are not counted again."""
        if id(tensor) not in self._seen:
            self.bytes += tensor.nbytes
        return tensor

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor once: later calls with the same tensor (a tied weight) don't. It must outlive this object."""
        self.tensor(tensor)
        self._seen.add(id(tensor))
        return tensor

    def layers(self, reader: WeightReader, count: int, pack: Callable[[LayerWeights], _Packed]) -> list[_Packed]:
        """Read, count and pack `count` layers one at a time; return the packed layers."""
        packed = []
        for index in range(count):
            layer = reader.layer(index)
            layer = replace(
                layer,
                query_key_value=self.linear(layer.query_key_value, 3),
                attention_output=self.linear(layer.attention_output),
                gate_up=self.linear(layer.gate_up, 2),
                down=self.linear(layer.down),
            )
            for value in vars(layer).values():
                if isinstance(value, torch.Tensor):
                    self.tensor(value)
            packed.append(pack(layer))
            # Free the layer before the next one is read.
            del layer
        return packed


def build_llama(
    reader: WeightReader, architecture: Architecture, tables: RopeTables, pack: PackLinear, read: ReadWeights
) -> Llama:
    """Read a checkpoint into a Llama. pack: creates a linear layer. read: converts and counts what `reader` returns."""
    embedding = read.keep(reader.embedding())
    layers = read.layers(reader, architecture.layers, lambda layer: layer.with_linears(pack))
    norm = read.tensor(reader.norm())
    return assemble_llama(architecture, tables, embedding, layers, norm, pack(read.linear(reader.head())))


def float_linear(weight: LinearWeight) -> Linear:
    """Return the linear layer of an unquantized weight."""
    return partial(functional.linear, weight=weight.weight, bias=weight.bias)


def assemble_llama(
    architecture: Architecture,
    tables: RopeTables,
    embedding: torch.Tensor,
    layers: Sequence[Layer],
    norm: torch.Tensor,
    head: Linear,
) -> Llama:
    """Return a Llama of these layers and tensors. tables: in any dtype."""
    # transformers' Gemma rounds this factor to the embedding's dtype, too.
    scale = torch.tensor(architecture.embedding_scale).to(embedding.dtype).item()
    converted = {kind: (cosine.to(embedding), sine.to(embedding)) for kind, (cosine, sine) in tables.items()}
    return Llama(replace(architecture, embedding_scale=scale), embedding, layers, norm, head, converted)
