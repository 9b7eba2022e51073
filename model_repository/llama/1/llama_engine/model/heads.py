"""Attention head counts and dimensions from a checkpoint's config, with defaults for missing fields."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaConfig


def key_value_heads(config: LlamaConfig) -> int:
    """Return the number of KV heads."""
    return config.num_key_value_heads or config.num_attention_heads


def head_dim(config: LlamaConfig) -> int:
    """Return the dimension of an attention head."""
    return config.head_dim or config.hidden_size // config.num_attention_heads
