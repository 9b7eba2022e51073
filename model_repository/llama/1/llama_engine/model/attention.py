"""Decode attention over each row's own length, registered with transformers as an attention implementation.

transformers looks an attention up by its name in the model's config and passes it the forward call's extra arguments. A
decode step passes `by_row`; a prefill doesn't and gets PyTorch's SDPA. Used only with a fused decode attention.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llama_engine.kernels.selection import DecodeAttention

NAME = "slots"


class ByRow(Protocol):
    """Decode attention bound to the lengths of its rows."""

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim]; the arguments are those of `reference.decode_attention`."""


def by_row(attention: DecodeAttention, lengths: torch.Tensor) -> ByRow:
    """Bind the lengths, [rows], of a decode step; the model takes the result as `by_row`."""
    return partial(_by_row, attention, lengths)


def attend_by_row(model: LlamaForCausalLM) -> None:
    """Make the model's forward passes accept `by_row`; without it they compute what they did before.

    transformers makes no mask for an attention implementation that it doesn't know; a mask that is passed is used.
    """
    AttentionInterface.register(NAME, _attend)
    model.set_attn_implementation(NAME)


def _by_row(
    attention: DecodeAttention,
    lengths: torch.Tensor,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    scaling: float,
) -> torch.Tensor:
    return attention(query, keys, values, lengths, scaling)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    by_row: ByRow | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return [rows, width, heads, head dim].

    query: [rows, heads, width, head dim]. key, value: as the cache returns them.
    """
    if by_row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    return by_row(query[:, :, 0], key, value, scaling=scaling)[:, None], None
