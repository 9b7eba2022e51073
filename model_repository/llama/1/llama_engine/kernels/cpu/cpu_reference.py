"""Reference implementation of the CPU kernels in PyTorch: exact products bit for bit, everything else in float64."""

from __future__ import annotations

import torch

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.rope import RopeTables
from llama_engine.checkpoint.weights import LayerWeights, LinearWeight
from llama_engine.kernels.activation_terms import ONE_TERM, SPLIT, TWO_TERMS, ActivationTerms


def quantize(x: torch.Tensor, terms: ActivationTerms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [tokens, inputs] int64 and scale [tokens] float32, x ≈ scale · q, with the same bits as the kernels."""
    amax = x.abs().amax(-1, keepdim=True)
    # Not `127 / amax`, which torch rounds twice, as 127 · (1 / amax).
    inverse = torch.where(amax > 1e-30, torch.full_like(amax, 127) / amax, 0)
    inlier = _largest_inlier(x * inverse, terms)
    steps = (torch.full_like(inlier, 127) / inlier).clamp(max=SPLIT)
    return (x * (inverse * steps)).round().long(), (amax / 127 / steps)[:, 0]


def _largest_inlier(scaled: torch.Tensor, terms: ActivationTerms) -> torch.Tensor:
    """Return the largest magnitude [tokens, 1] that is no outlier, of values [tokens, inputs] scaled to at most 127."""
    if terms in (ONE_TERM, TWO_TERMS):
        return torch.full_like(scaled[:, :1], 127 if terms == ONE_TERM else 0)
    magnitudes, limit = scaled.abs(), torch.tensor(torch.inf)
    for _ in range(2):
        total = _sum_of_lanes(torch.where(magnitudes <= limit, magnitudes, 0))
        limit = total * torch.tensor(terms.outlier_ratio / scaled.shape[1])
    return torch.where(magnitudes <= limit, magnitudes, 0).amax(-1, keepdim=True)


def _sum_of_lanes(x: torch.Tensor) -> torch.Tensor:
    """Return sums [tokens, 1] of x [tokens, inputs] in the kernels' order: in 64 lanes, then in pairs."""
    lanes = torch.zeros(len(x), 64)
    wide = torch.nn.functional.pad(x, (0, -x.shape[1] % 64))
    for part in wide.view(len(x), -1, 64).unbind(1):
        lanes = lanes + part
    while lanes.shape[1] > 1:
        lower, upper = lanes.chunk(2, dim=1)
        lanes = lower + upper
    return lanes


def linear(x: torch.Tensor, layer: LinearWeight, terms: ActivationTerms) -> torch.Tensor:
    """Return a linear layer's exact INT8 product with x [tokens, inputs] float32, with the same bits as the kernels."""
    assert layer.scales is not None
    q, scale = quantize(x, terms)
    if layer.group_size is None:
        y = (q @ layer.weight.long().T).double().float() * (scale[:, None] * layer.scales)
    else:
        y = scale[:, None] * _group_total(q, layer, layer.scales)
    return y if layer.bias is None else y + layer.bias.float()


def _group_total(q: torch.Tensor, layer: LinearWeight, scales: torch.Tensor) -> torch.Tensor:
    """Return the sums of low and high terms with the scales and offsets of their groups, [tokens, outputs] float32."""
    if layer.order is not None:
        q = q[:, layer.order]
    high = (q.float() * torch.tensor(1 / SPLIT)).round().double()
    size = q.shape[1] // scales.shape[1]
    low_total = _total(q - SPLIT * high, layer, scales, size, size)
    return low_total + SPLIT * _total(high, layer, scales, size, 4)


def _total(
    terms: torch.Tensor, layer: LinearWeight, scales: torch.Tensor, group_size: int, columns: int
) -> torch.Tensor:
    """Return Σ scale · Σ t·w + offset · Σ t over parts of so many columns, in ascending order."""
    total = torch.zeros(len(terms), len(layer.weight))
    for first in range(0, terms.shape[1], columns):
        part, weight = (values[:, first : first + columns].double() for values in (terms, layer.weight))
        group = first // group_size
        # Each product is exact. Products and sums are rounded apart.
        total = total + scales[:, group] * (part @ weight.T).float()
        if layer.offsets is not None:
            total = total + layer.offsets[:, group] * part.sum(1, keepdim=True).float()
    return total


def attention(
    qkv: torch.Tensor,
    architecture: Architecture,
    index: int,
    layer: LayerWeights,
    tables: RopeTables,
    cache_dtype: torch.dtype,
) -> torch.Tensor:
    """Return the attention [tokens, heads, head_dim] of a layer for a whole sequence, in float64.

    Keys and values are rounded to `cache_dtype`. qkv: [tokens, heads + 2 · KV heads, head_dim], before norms and RoPE.
    layer: the weights at `index`, for their norms of query and key.
    """
    heads, kv_heads, tokens = architecture.heads, architecture.kv_heads, len(qkv)
    query, key, value = (qkv[:, :heads].double(), *qkv[:, heads:].double().chunk(2, dim=1))
    if layer.query_norm is not None:
        query = _normalize_heads(query, layer.query_norm, architecture)
        key = _normalize_heads(key, layer.key_norm, architecture)
    if (kind := architecture.ropes[index]) is not None:
        cosine, sine = (table[:tokens, None].double() for table in tables[kind])
        query, key = _rotate(query, cosine, sine), _rotate(key, cosine, sine)
    key, value = (_rounded(states, cache_dtype).repeat_interleave(heads // kv_heads, dim=1) for states in (key, value))
    scores = soft_cap(torch.einsum("ihd,jhd->hij", query, key) * architecture.scaling, architecture.attention_softcap)
    attended = torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if (window := architecture.windows[index]) is not None:
        attended = attended.triu(1 - window)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~attended, -torch.inf).softmax(-1), value)


def normalize(x: torch.Tensor, gain: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Return RMSNorm of x with a gain; None is no norm."""
    if gain is None:
        return x
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * gain.double()


def _normalize_heads(x: torch.Tensor, gain: torch.Tensor | None, architecture: Architecture) -> torch.Tensor:
    together = architecture.query_key_norm == "projection"
    return normalize(x.flatten(1) if together else x, gain, architecture.epsilon).view(x.shape)


def _rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    a, b, others = x.tensor_split((cosine.shape[-1], 2 * cosine.shape[-1]), dim=-1)
    return torch.cat((a * cosine - b * sine, b * cosine + a * sine, others), dim=-1)


def soft_cap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return cap · tanh(x / cap), or x without a cap."""
    return x if cap is None else (x / cap).tanh() * cap


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype != torch.int8:
        return x.to(dtype).double()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(scale > 0, (x / scale).round() * scale, 0)
