"""The forward pass of a Llama in PyTorch, over a flat list of tokens: no padding, no transformers modules.

`Architecture` has the options that distinguish the families. Source: transformers' modeling_<model type>.py, whose
results it reproduces; the structure follows gpt-fast's model.py. Linear
layers are callables, so that the forward pass is the same for floats, INT8 and bitsandbytes' modules. Attention is a
callable that reads and writes the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.rope import RopeTables
from llama_engine.checkpoint.weights import DecoderLayer
from llama_engine.kernels.gpu.elementwise import Rotate, rotate

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A linear layer: [..., in] → [..., out]."""

Layer = DecoderLayer[Linear]

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [n, heads, dim], key, value [n, KV heads, dim]) → [n, heads, dim]; RoPE is already applied."""

Adapt = Callable[[int, str, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, field of DecoderLayer, inputs [n, in], outputs [n, out] of its linear layer) → outputs with LoRA adapters."""


def without_adapters(layer: int, field: str, inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return the outputs as they are."""
    return outputs


def gelu_tanh(values: torch.Tensor) -> torch.Tensor:
    """Return GELU with a tanh in place of the error function."""
    if values.dtype != torch.float32:
        return functional.gelu(values, approximate="tanh")
    # The bits of functional.gelu depend on an element's place in the tensor, and so on the batch.
    return values * (torch.tanh((values * values * values * 0.044715 + values) * math.sqrt(2 / math.pi)) + 1) * 0.5


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": functional.silu, "gelu_tanh": gelu_tanh}
"""The activations of the gate by `Architecture.activation`."""


def softcap(values: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap · tanh(values / cap), or the values if there is no cap."""
    return values if cap is None else (values / cap).tanh() * cap


@dataclass(frozen=True)
class Llama:
    """A loaded model without a KV cache; several runners can share it.

    embedding: [vocabulary, hidden]. norm: gain of the final RMSNorm, [hidden]. tables: RoPE's, in the embedding's
    dtype. rotary: applies RoPE.
    """

    architecture: Architecture
    embedding: torch.Tensor
    layers: Sequence[Layer]
    norm: torch.Tensor
    head: Linear
    tables: RopeTables
    rotary: Rotate = rotate

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attention, adapt: Adapt = without_adapters
    ) -> torch.Tensor:
        """Return the hidden states [n, hidden] of tokens [n] at positions [n]."""
        hidden = _scaled(functional.embedding(tokens, self.embedding), self.architecture.embedding_scale)
        angles = {kind: [table[positions][:, None] for table in tables] for kind, tables in self.tables.items()}
        for index, layer in enumerate(self.layers):
            kind = self.architecture.ropes[index]
            inputs = self._normalize(hidden, layer.attention_norm)
            heads = adapt(index, "query_key_value", inputs, layer.query_key_value(inputs))
            attended = self._attend(index, layer, heads, None if kind is None else angles[kind], attend)
            output = adapt(index, "attention_output", attended, layer.attention_output(attended))
            hidden = hidden + self._branch(output, layer.attention_output_norm)
            inputs = self._normalize(hidden, layer.mlp_norm)
            gate, up = adapt(index, "gate_up", inputs, layer.gate_up(inputs)).chunk(2, dim=-1)
            gated = ACTIVATIONS[self.architecture.activation](gate) * up
            output = adapt(index, "down", gated, layer.down(gated))
            hidden = hidden + self._branch(output, layer.mlp_output_norm)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden]."""
        logits = _scaled(self.head(self._normalize(hidden, self.norm)), self.architecture.logits_scale)
        return softcap(logits, self.architecture.logits_softcap)

    def _attend(
        self, index: int, layer: Layer, heads: torch.Tensor, angles: Sequence[torch.Tensor] | None, attend: Attention
    ) -> torch.Tensor:
        """Return the attention [n, heads · dim] of query, key and value, [n, (heads + 2 · KV heads) · dim].

        angles: RoPE's cosine and sine at the tokens' positions, [n, 1, rotary / 2]; None in a layer without RoPE.
        """
        queries, keys, dim = self.architecture.heads, self.architecture.kv_heads, self.architecture.head_dim
        heads = heads.view(len(heads), -1, dim)
        rotated = heads[:, :-keys]
        if layer.query_norm is not None:
            query = self._normalize_heads(rotated[:, :queries], layer.query_norm)
            rotated = torch.cat((query, self._normalize_heads(rotated[:, queries:], layer.key_norm)), dim=1)
        if angles is not None:
            rotated = self.rotary(rotated, *angles)
        return attend(index, rotated[:, :queries], rotated[:, queries:], heads[:, -keys:]).flatten(1)

    def _branch(self, output: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """Return what attention or MLP add to the hidden states."""
        return _scaled(self._normalize(output, gain), self.architecture.residual_scale)

    def _normalize_heads(self, heads: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """Normalize [n, heads, dim]: each head, or all of them together."""
        together = self.architecture.query_key_norm == "projection"
        return self._normalize(heads.flatten(1) if together else heads, gain).view(heads.shape)

    def _normalize(self, hidden: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        if gain is None:
            return hidden
        normalized = functional.rms_norm(hidden.to(gain.dtype), gain.shape, gain, self.architecture.epsilon)
        return normalized.to(hidden.dtype)


def _scaled(values: torch.Tensor, factor: float) -> torch.Tensor:
    return values if factor == 1.0 else values * factor
