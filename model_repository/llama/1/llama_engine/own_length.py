"""Attention for decode steps on a CPU: each row reads its own positions, and no other row's length.

One call over all rows reads every row up to the longest one's end, whatever its own length, and hides the rest behind a
mask: at mixed lengths about half of what is read is for nothing, and reading is what attention takes. Here each row is
a call of its own over just its positions, without a mask. What a row gets doesn't depend on its neighbours' lengths
either. On a GPU so many small calls would cost more than they save; there, one call it is.

Knows queries, keys and values; registered with transformers by its name.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name that everybody uses
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "own_length"


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    lengths: Sequence[int] | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Return [rows, width, heads, head dim].

    lengths: how many positions each row's only query reads; None for a pass over prompts, which SDPA does in one call.
    """
    if lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)  # type: ignore[arg-type]
    grouped = query.shape[1] != key.shape[1]
    split = (torch.split(states, 1) for states in (query, key, value))
    rows = [
        F.scaled_dot_product_attention(
            one, keys[:, :, :length], values[:, :, :length], scale=scaling, enable_gqa=grouped
        )
        for one, keys, values, length in zip(*split, lengths, strict=True)
    ]
    return torch.cat(rows).transpose(1, 2), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
