"""References of the kernels in plain PyTorch; `int8_product` is also used in production.

Each function specifies its kernel in `int8_product` or `decode_attention`: same arguments, same shapes, same result up
to the order in which float32 numbers are added.
"""

from __future__ import annotations

import torch


def int8_product(
    activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return activations · (scales · weight)ᵀ + bias, accumulated in float32; activations are not rounded.

    activations: [rows, in], float. weight: [out, in], int8 (bitsandbytes' `weight.CB`). scales: [out], float32, the
    value of 1 in that row (bitsandbytes' `weight.SCB` / 127). bias: [out] or None. Returns [rows, out] in the dtype of
    the activations.

    The scale is applied to the sum: integers up to 127 are exact in float16 and bfloat16, scaled weights are not. The
    unscaled sum overflows float16, so it stays in float32.
    """
    if activations.is_cuda and activations.dtype != torch.float32:
        product = torch.mm(activations, weight.to(activations.dtype).t(), out_dtype=torch.float32)
    else:
        product = torch.mm(activations.float(), weight.float().t())
    product *= scales
    if bias is not None:
        product += bias
    return product.to(activations.dtype)


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
