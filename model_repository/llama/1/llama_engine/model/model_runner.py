"""Forward passes over a KV cache: prefill prompts, decode one token per row, compute logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class PromptChunk(NamedTuple):
    """Consecutive tokens of one prompt: all of it, or a part from the position `start` on. slot: its KV slot."""

    slot: int
    start: int
    tokens: Sequence[int]


class ModelRunner(Protocol):
    """A model and its KV cache. Not thread-safe: one pass at a time.

    Every pass can be repeated: it writes the same keys and values again and changes nothing else.
    """

    def prefill(self, chunks: Sequence[PromptChunk], every: bool = False) -> torch.Tensor:
        """Write chunks to their slots; return the hidden states of their last tokens, [chunks, hidden].

        every: those of all their tokens instead, [tokens, hidden].
        """

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of a slot's first positions to another slot."""

    def decode(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Run one token per row; return hidden states, [rows, hidden].

        slots, tokens, positions: [rows], int64. span: exceeds every position that is not padding.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary] of [rows, hidden]."""

    def warm_up(self) -> None:
        """Run every kernel that a decode step may need, so that none is compiled when requests come."""
