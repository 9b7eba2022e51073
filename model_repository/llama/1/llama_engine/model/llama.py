"""A Llama's forward pass in PyTorch, over a flat list of tokens: no padding, no transformers modules.

Source: transformers' modeling_llama.py, whose results it reproduces; the structure follows gpt-fast's model.py. Linear
layers are callables, so that the forward pass is the same for floats, INT8 and bitsandbytes' modules. Attention is a
callable that reads and writes the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A linear layer: [..., in] → [..., out]."""

Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, query [n, heads, dim], key, value [n, KV heads, dim]) → [n, heads, dim]; RoPE is already applied."""

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(heads [n, heads, dim], cosine, sine [n, 1, dim / 2]) → [n, heads, dim]."""


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to [n, heads, dim]; cosine, sine: [n, 1, dim / 2]. Pairs are (i, i + dim / 2)."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


@dataclass(frozen=True)
class Layer:
    """One decoder layer, with q|k|v and gate|up fused as in `LayerWeights`."""

    attention_norm: torch.Tensor
    query_key_value: Linear
    attention_output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Llama:
    """A loaded model without a KV cache; several runners can share it.

    embedding: [vocabulary, hidden]. norm: gain of the final RMSNorm, [hidden]. cosine, sine: tables of RoPE,
    [positions, head dim / 2]. rotary: applies RoPE.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    epsilon: float
    embedding: torch.Tensor
    layers: Sequence[Layer]
    norm: torch.Tensor
    head: Linear
    cosine: torch.Tensor
    sine: torch.Tensor
    rotary: Rotate = rotate

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attention) -> torch.Tensor:
        """Return the hidden states [n, hidden] of tokens [n] at positions [n]."""
        hidden = functional.embedding(tokens, self.embedding)
        cosine, sine = self.cosine[positions][:, None], self.sine[positions][:, None]
        for index, layer in enumerate(self.layers):
            projected = layer.query_key_value(self._normalize(hidden, layer.attention_norm))
            heads = projected.view(len(tokens), -1, self.head_dim)
            rotated = self.rotary(heads[:, : -self.key_value_heads], cosine, sine)
            query, key = rotated[:, : self.heads], rotated[:, self.heads :]
            attended = attend(index, query, key, heads[:, -self.key_value_heads :])
            hidden = hidden + layer.attention_output(attended.flatten(1))
            gate, up = layer.gate_up(self._normalize(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(functional.silu(gate) * up)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden]."""
        return self.head(self._normalize(hidden, self.norm))

    def _normalize(self, hidden: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(hidden, gain.shape, gain, self.epsilon)
