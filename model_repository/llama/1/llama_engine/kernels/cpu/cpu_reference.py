"""Reference implementation of the CPU kernels in PyTorch: exact products bit for bit, everything else in float64."""

from __future__ import annotations

import torch
from torch.nn import functional

from llama_engine.kernels.cpu.packing import Dimensions
from llama_engine.model.activation_terms import ActivationTerms
from llama_engine.model.weights import LayerWeights, LinearWeight

SPLIT = 254
"""Weight of the high term: a quantized activation of two terms is q = SPLIT · high + low."""


def quantize(x: torch.Tensor, terms: ActivationTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [rows, inputs] int64 and scale [rows] float32 with x ≈ scale · q, with the same bits as the kernels."""
    amax = x.abs().amax(-1, keepdim=True)
    # Not `127 / amax`, which torch rounds twice, as 127 · (1 / amax).
    scaled = x * torch.where(amax > 1e-30, torch.full_like(amax, 127) / amax, 0)
    high = scaled.round()
    squares = high.long().pow(2).sum(-1, keepdim=True)
    two = (squares > 0) & (squares.double() < terms.limit(x.shape[1]))
    q = torch.where(two, SPLIT * high.long() + ((scaled - high) * SPLIT).round().long(), high.long())
    return q, (amax / 127 / torch.where(two, SPLIT, 1))[:, 0]


def linear(x: torch.Tensor, layer: LinearWeight, terms: ActivationTerms) -> torch.Tensor:
    """Return a linear layer's exact INT8 product with x [rows, inputs] float32, with the same bits as the kernels."""
    assert layer.scales is not None
    q, scale = quantize(x, terms)
    y = (q @ layer.weight.long().T).double().float() * (scale[:, None] * layer.scales)
    return y if layer.bias is None else y + layer.bias.float()


def attention(
    qkv: torch.Tensor, dimensions: Dimensions, cosine: torch.Tensor, sine: torch.Tensor, cache_dtype: torch.dtype
) -> torch.Tensor:
    """Return the attention [tokens, heads, head_dim] of a whole sequence, in float64.

    Keys and values are rounded to `cache_dtype`. qkv: [tokens, heads + 2 · KV heads, head_dim], before RoPE.
    """
    heads, kv_heads, tokens = dimensions.heads, dimensions.kv_heads, len(qkv)
    query, key, value = (qkv[:, :heads].double(), *qkv[:, heads:].double().chunk(2, dim=1))
    cosine, sine = cosine[:tokens, None].double(), sine[:tokens, None].double()
    key = _cached(_rotate(key, cosine, sine), cache_dtype).repeat_interleave(heads // kv_heads, dim=1)
    value = _cached(value, cache_dtype).repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("ihd,jhd->hij", _rotate(query, cosine, sine), key) * dimensions.scaling
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value)


def logits(
    x: torch.Tensor,
    dimensions: Dimensions,
    layers: list[LayerWeights],
    norm: torch.Tensor,
    head: LinearWeight,
    tables: tuple[torch.Tensor, torch.Tensor],
    cache_dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of a whole sequence from its embeddings x, in float64.

    Weights are the stored INT8 weights; activations are not quantized. tables: RoPE's cosine and sine.
    """
    x, width = x.double(), dimensions.heads * dimensions.head_dim
    for layer in layers:
        qkv = _linear(_normalize(x, layer.attention_norm, dimensions.epsilon), layer.query_key_value)
        attended = attention(qkv.view(len(x), -1, dimensions.head_dim), dimensions, *tables, cache_dtype)
        x = x + _linear(attended.reshape(len(x), width), layer.attention_output)
        gate, up = _linear(_normalize(x, layer.mlp_norm, dimensions.epsilon), layer.gate_up).chunk(2, dim=-1)
        x = x + _linear(functional.silu(gate) * up, layer.down)
    return _linear(_normalize(x, norm, dimensions.epsilon), head)


def _linear(x: torch.Tensor, layer: LinearWeight) -> torch.Tensor:
    assert layer.scales is not None
    y = x @ (layer.weight.double() * layer.scales.double()[:, None]).T
    return y if layer.bias is None else y + layer.bias.double()


def _normalize(x: torch.Tensor, gain: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * gain.double()


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1)


def _cached(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.int8:
        return x.to(dtype).double()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0)
