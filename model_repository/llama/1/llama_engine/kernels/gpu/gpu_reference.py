"""The reference of the fused decode attention, in plain PyTorch.

It specifies the kernel in `decode_attention`: same arguments, same shapes, same result up to the order in which float32
numbers are added.
"""

from __future__ import annotations

import torch


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Return the attention of one query per row and head over the positions 0 … length − 1 of the row's slot.

    query: [rows, heads, head dim]. keys, values: [slots, key-value heads, span, head dim], a view of the KV cache;
    heads is a multiple of key-value heads, and adjacent heads share one. slots: [rows], integers, the slot of each row.
    lengths: [rows], integers, 0 … span; positions from the length on may hold anything, NaN included. Returns [rows,
    heads, head dim] in the dtype of the query; zeros for a row of length 0. Softmax and sums in float32.
    """
    group = query.shape[1] // keys.shape[1]
    outside = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
    # Zeroed as well as masked: zero times a stale NaN is NaN.
    keys = keys[slots].float().masked_fill(outside[:, None, :, None], 0.0).repeat_interleave(group, 1)
    values = values[slots].float().masked_fill(outside[:, None, :, None], 0.0).repeat_interleave(group, 1)
    scores = torch.einsum("rhd,rhpd->rhp", query.float(), keys) * scaling
    weights = scores.masked_fill(outside[:, None], -torch.inf).softmax(-1)
    # The softmax over no positions is NaN.
    weights = weights.masked_fill((lengths == 0)[:, None, None], 0.0)
    return torch.einsum("rhp,rhpd->rhd", weights, values).to(query.dtype)
