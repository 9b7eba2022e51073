"""The model's attention over slots: in a decode step every row by itself, in a prefill what PyTorch has.

transformers calls an attention by its name in the model's config, with whatever the caller of the forward pass gave
along; a decode step gives along what answers for its rows. Knows neither the cache nor who sits where.
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
    """A decode attention that knows the lengths of its rows."""

    def __call__(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *, scaling: float
    ) -> torch.Tensor:
        """Return [rows, heads, head dim]; the arguments are those of `reference.decode_attention`."""


def by_row(attention: DecodeAttention, lengths: torch.Tensor) -> ByRow:
    """Return what a decode step over rows of these lengths, [rows], gives along to the model as `by_row`."""
    return partial(_by_row, attention, lengths)


def attend_by_row(model: LlamaForCausalLM) -> None:
    """Let the model's forward passes take `by_row`; without it they are what they were.

    No mask is ever made for an attention that transformers doesn't know; a mask that is given is used.
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
    """Return [rows, width, heads, head dim]. query: [rows, heads, width, head dim]. key, value: as the cache gives."""
    if by_row is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    return by_row(query[:, :, 0], key, value, scaling=scaling)[:, None], None
