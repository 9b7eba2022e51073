"""Forward passes over the KV cache: prefill prompts, decode one token per slot, compute logits.

Every pass can be repeated: it writes the same keys and values again and changes nothing else.

A fused decode attention is registered with transformers as an attention implementation: transformers looks it up by its
name in the model's config and passes it the forward call's extra arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llama_engine.kernels.selection import DecodeAttention
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint

SPAN_BUCKET = 64
"""Attention reads whole buckets of positions, so that the shapes of a decode step change rarely."""

_ATTENTION = "slots"


class ModelRunner:
    """A decoder and its head over a KV cache. Not thread-safe: one pass at a time."""

    def __init__(self, checkpoint: Checkpoint, kv_cache: KVCache) -> None:
        self._device = checkpoint.info.device
        self._decoder = checkpoint.model.model
        self._head = checkpoint.model.lm_head
        self._attention = checkpoint.kernels.attention
        if self._attention is not None:
            # Passes without lengths compute what they did before: transformers makes no mask for an implementation that
            # it doesn't know, and uses one that is passed.
            AttentionInterface.register(_ATTENTION, _attend)
            checkpoint.model.set_attn_implementation(_ATTENTION)
        self._cache = kv_cache
        self._max_model_len = kv_cache.shape.max_model_len
        self._columns = torch.arange(self._max_model_len, device=self._device)

    def prefill(self, first: int, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Write whole prompts to the slots `first` …; return the hidden states of their last tokens, [rows, hidden].

        Prompts are padded on the right: a prompt token attends only to its left, outputs at padding positions are
        finite and discarded, and what padding writes to the cache is overwritten before it is read.
        """
        width = max(map(len, prompts))
        # The padding token is the row's own last token: another one might overflow where the row's tokens don't, and a
        # mask doesn't hide a NaN in the cache.
        tokens = [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts]
        positions = self._columns[:width].expand(len(prompts), width)
        # No mask: with nothing before the prompt and padding behind it, a prefill is plainly causal, which SDPA
        # computes without width x width booleans per row.
        hidden = self._forward(first, torch.tensor(tokens, device=self._device), positions, width, mask=None)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        return hidden[torch.arange(len(prompts), device=self._device), last]

    def prefill_chunk(self, slot: int, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Write a chunk of a prompt at the positions `start` …; return its last token's hidden state, [1, hidden]."""
        end = start + len(tokens)
        positions = self._columns[None, start:end]
        mask = (self._columns[:end] <= positions[:, :, None])[:, None]
        return self._forward(slot, torch.tensor([tokens], device=self._device), positions, end, mask)[:, -1]

    def decode(self, first: int, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Run one token per slot for the slots `first` …; return hidden states, [rows, hidden].

        tokens, positions: [rows, 1]. span: exceeds every position (see `decode_span`). A position of max_model_len
        marks a padding row of a captured step: it writes to the cache's spare position, and its output is finite and
        discarded.
        """
        if self._attention is not None:
            lengths = torch.where(positions < self._max_model_len, positions + 1, 0)[:, 0]
            return self._forward(first, tokens, positions, span, mask=None, lengths=lengths)[:, -1]
        # [rows, 1, 1, span]: a token attends to its own position and everything before it.
        mask = (self._columns[:span] <= positions)[:, None, None]
        return self._forward(first, tokens, positions, span, mask)[:, -1]

    def decode_span(self, longest: int) -> int:
        """Return the positions that a decode step reads; longest: the greatest number of cached positions of a slot."""
        return min(-(-(longest + 1) // SPAN_BUCKET) * SPAN_BUCKET, self._max_model_len)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary] of [rows, hidden]."""
        logits: torch.Tensor = self._head(hidden)
        return logits

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run decode steps of every shape class, so that no kernel is compiled when requests come.

        Kernels differ by the number of rows, in tiles, and by the presence of a long row. Only while no slot is in use:
        the steps write to the cache, finite values and no sequence's.
        """
        slots, longest = self._cache.shape.slots, self._max_model_len - 1
        for rows in sorted({1, min(17, slots), min(33, slots), slots}):
            tokens = torch.zeros(rows, 1, dtype=torch.long, device=self._device)
            for length in (0, longest):
                self.logits(self.decode(0, tokens, torch.full_like(tokens, length), self.decode_span(length)))

    def _forward(
        self,
        first: int,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        span: int,
        mask: torch.Tensor | None,
        lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run [rows, width] tokens at their positions in the slots `first` …; return [rows, width, hidden].

        mask: [rows, 1, width, span], True where a token attends; None is causal over the pass itself. lengths: [rows],
        what the fused decode attention reads of each row; it replaces the mask where the width is 1.
        """
        self._cache.bind(first, positions, span)
        hidden: torch.Tensor = self._decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **({} if lengths is None else {"decode_attention": self._attention, "lengths": lengths}),
        ).last_hidden_state
        return hidden


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    decode_attention: DecodeAttention | None = None,
    lengths: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return [rows, width, heads, head dim]: fused decode attention over each row's own length, or PyTorch's SDPA.

    query: [rows, heads, width, head dim]. key, value: as the cache returns them.
    """
    if decode_attention is None or lengths is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling)
    return decode_attention(query[:, :, 0], key, value, lengths, scaling)[:, None], None
