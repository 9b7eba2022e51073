"""The interface of model runners: forward passes of chunks and of decode steps over a KV cache, and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from llama_engine.kernels.activation_terms import TermCounts
from llama_engine.kernels.cpu.lora import LoraTable
from llama_engine.kernels.cpu.paged_cache import PagedCache
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.torch_loras import TorchLoras


class TokenChunk(NamedTuple):
    """Consecutive tokens of one sequence that a pass computes, as in chunked prefill; a stream's chunk is a `Chunk`.

    slot: the sequence's slot in the page table. start: position of the first token.
    """

    slot: int
    start: int
    tokens: Sequence[int]


class ModelRunner(Protocol):
    """Runs a model over a KV cache. Not thread-safe: one pass at a time.

    Every pass is repeatable: it writes the same keys and values again and has no other side effects.
    """

    @property
    def cache(self) -> PagedCache | KVCache:
        """The pages, and the page table."""

    @property
    def loras(self) -> LoraTable | TorchLoras:
        """The LoRA adapters, and the one of each slot's sequence."""

    def run_chunks(self, chunks: Sequence[TokenChunk], every: bool = False) -> torch.Tensor:
        """Compute successive tokens of prompts, or a last token and its drafts, and cache them.

        Returns the hidden states of each chunk's last token, [chunks, hidden].

        every: return the hidden states of all tokens instead, [tokens, hidden].
        """

    def decode(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Run a decode step of one token per sequence; return hidden states, [batch, hidden].

        slots, tokens, positions: [batch], int64. span: number of positions that attention reads, greater than every
        position except those of padding.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden]."""

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [n, hidden] after the final norm, in float32; each has the same bits for any n."""

    def take_term_counts(self) -> TermCounts:
        """Return each linear layer's tokens and two-term columns since the last call; empty if they aren't counted."""

    def warm_up(self) -> None:
        """Run every kernel that a decode step may need, so that requests don't wait for compilation or loading."""
