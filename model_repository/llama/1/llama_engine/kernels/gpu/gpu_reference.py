"""Reference implementation of attention on a GPU, in plain PyTorch."""

from __future__ import annotations

import torch


def attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    length: int,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """Return the causal attention [n, heads, dim] of the last n of a sequence's `length` positions.

    query: [n, heads, dim]. keys, values: [positions, KV heads, dim] of the sequence; positions from `length` on are
    ignored. window: number of positions that a query attends to; None is all. Softmax and sums are computed in float32.
    """
    count, group = len(query), query.shape[1] // keys.shape[1]
    keys = keys[:length].float().repeat_interleave(group, 1)
    values = values[:length].float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,phd->hqp", query.float(), keys) * scaling
    last = torch.arange(length - count, length, device=query.device)
    positions = torch.arange(length, device=query.device)
    outside = (positions > last[:, None]) | (positions <= last[:, None] - (window or length))
    return torch.einsum("hqp,phd->qhd", scores.masked_fill(outside, -torch.inf).softmax(-1), values).to(query.dtype)
