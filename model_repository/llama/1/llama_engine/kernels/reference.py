"""The two products of a decode step as plain PyTorch: what they mean, and what is used where nothing faster can be.

Each function here is the contract that its fused form keeps (`int8_kernel`, `attention_kernel`): same arguments, same
shapes, the same result but for the order in which float32 numbers are added. Knows tensors; neither layers nor rows.
"""

from __future__ import annotations

import torch


def int8_product(
    activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return activations · (scales · weight)ᵀ + bias, added up in float32, with nothing rounded but the weights.

    activations: [rows, in], float. weight: [out, in], int8 (bitsandbytes' `weight.CB`). scales: [out], float32: what a
    1 of that row is worth (bitsandbytes' `weight.SCB` / 127). bias: [out] or None. Returns [rows, out], in the dtype
    of the activations.

    The scale comes last, on the sum: a weight of whole numbers up to 127 is exact in float16 and bfloat16, a scaled
    one would not be; and the unscaled sum overflows float16, so it leaves the product in float32.
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
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Return what one query a row and head reads from the row's own positions 0 … length − 1.

    query: [rows, heads, head dim]. keys, values: [rows, key-value heads, span, head dim], a view of the slot cache;
    heads is a multiple of key-value heads, and neighbouring heads share one. lengths: [rows], integers, 0 … span: what
    lies behind is never looked at, whatever is there. Returns [rows, heads, head dim] in the dtype of the query; zeros
    for a row of length 0. Softmax and sums in float32.
    """
    group = query.shape[1] // keys.shape[1]
    outside = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
    # Zeroed as well as masked: zero times a stale NaN would still be NaN.
    keys = keys.float().masked_fill(outside[:, None, :, None], 0.0).repeat_interleave(group, 1)
    values = values.float().masked_fill(outside[:, None, :, None], 0.0).repeat_interleave(group, 1)
    scores = torch.einsum("rhd,rhpd->rhp", query.float(), keys) * scaling
    weights = scores.masked_fill(outside[:, None], -torch.inf).softmax(-1)
    # A row without positions has nothing to choose from, and its softmax is NaN.
    weights = weights.masked_fill((lengths == 0)[:, None, None], 0.0)
    return torch.einsum("rhp,rhpd->rhd", weights, values).to(query.dtype)
