"""Builds a `Llama`: layer by layer from a checkpoint's weights, or around the modules that transformers has loaded.

Each layer is packed before the next one is read, so that peak memory exceeds the finished model by one layer only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch
from torch.nn import functional

from llama_engine.model.heads import head_dim, key_value_heads
from llama_engine.model.llama import Layer, Linear, Llama
from llama_engine.model.weights import LayerWeights, LinearWeight

if TYPE_CHECKING:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_Packed = TypeVar("_Packed")

PackLinear = Callable[[LinearWeight], Linear]
"""Convert a weight into a linear layer. The caller holds the only reference, so that the weight can then be freed."""

Tables = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of the rotary embedding, [positions, head dim / 2]."""


class Reader(Protocol):
    """Reads a checkpoint's weights, each a private copy: `WeightReader`."""

    def embedding(self) -> torch.Tensor:
        """Return [vocabulary, hidden]."""

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of one layer."""

    def norm(self) -> torch.Tensor:
        """Return the gain of the final norm, [hidden]."""

    def head(self) -> LinearWeight:
        """Return the output projection."""


@dataclass
class ReadWeights:
    """Counts the weights of a checkpoint while they are read.

    linears: number of linear layers by weight dtype. bytes: size of all weights.
    """

    linears: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    _seen: set[int] = field(default_factory=set)

    def linear(self, weight: LinearWeight, fused: int = 1) -> LinearWeight:
        """Count the weight of `fused` fused linear layers, and return it."""
        self.linears[str(weight.weight.dtype).removeprefix("torch.")] += fused
        for tensor in (weight.weight, weight.scales, weight.bias):
            if tensor is not None:
                self.tensor(tensor)
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

    def layers(self, reader: Reader, count: int, pack: Callable[[LayerWeights], _Packed]) -> list[_Packed]:
        """Read, count and pack `count` layers one at a time; return the packed layers."""
        packed = []
        for index in range(count):
            layer = reader.layer(index)
            self.linear(layer.query_key_value, 3)
            self.linear(layer.attention_output)
            self.linear(layer.gate_up, 2)
            self.linear(layer.down)
            self.tensor(layer.attention_norm)
            self.tensor(layer.mlp_norm)
            packed.append(pack(layer))
            # Free the layer before the next one is read.
            del layer
        return packed


def build_llama(reader: Reader, config: LlamaConfig, tables: Tables, pack: PackLinear, read: ReadWeights) -> Llama:
    """Read a checkpoint into a Llama. pack: creates the linear layers. read: counts the weights."""

    def pack_layer(layer: LayerWeights) -> Layer:
        return Layer(
            layer.attention_norm,
            pack(layer.query_key_value),
            pack(layer.attention_output),
            layer.mlp_norm,
            pack(layer.gate_up),
            pack(layer.down),
        )

    embedding = read.keep(reader.embedding())
    layers = read.layers(reader, config.num_hidden_layers, pack_layer)
    norm = read.tensor(reader.norm())
    return _llama(config, tables, embedding, layers, norm, pack(read.linear(reader.head())))


def float_linear(weight: LinearWeight) -> Linear:
    """Return the linear layer of an unquantized weight."""
    return partial(functional.linear, weight=weight.weight, bias=weight.bias)


def llama_around(model: LlamaForCausalLM, tables: Tables) -> Llama:
    """Return a Llama around the modules that transformers loaded, with their linear layers of any kind."""

    def layer(module: LlamaDecoderLayer) -> Layer:
        attention, mlp = module.self_attn, module.mlp
        return Layer(
            module.input_layernorm.weight,
            _side_by_side((attention.q_proj, attention.k_proj, attention.v_proj)),
            attention.o_proj,
            module.post_attention_layernorm.weight,
            _side_by_side((mlp.gate_proj, mlp.up_proj)),
            mlp.down_proj,
        )

    decoder = model.model
    layers = [layer(cast("LlamaDecoderLayer", module)) for module in decoder.layers]
    return _llama(model.config, tables, decoder.embed_tokens.weight, layers, decoder.norm.weight, model.lm_head)


def _side_by_side(linears: Sequence[Linear]) -> Linear:
    return lambda activations: torch.cat([linear(activations) for linear in linears], dim=-1)


def _llama(
    config: LlamaConfig,
    tables: Tables,
    embedding: torch.Tensor,
    layers: Sequence[Layer],
    norm: torch.Tensor,
    head: Linear,
) -> Llama:
    cosine, sine = (table.to(embedding) for table in tables)
    return Llama(
        heads=config.num_attention_heads,
        key_value_heads=key_value_heads(config),
        head_dim=head_dim(config),
        epsilon=config.rms_norm_eps,
        embedding=embedding,
        layers=layers,
        norm=norm,
        head=head,
        cosine=cosine,
        sine=sine,
    )
