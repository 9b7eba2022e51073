"""The model over slots: forward passes that read prompts into the cache and take one token a row out of it.

Knows tokens, positions and the cache; neither requests, nor sampling, nor who sits where. Every pass can be repeated:
it writes to the cache what it wrote before, and nothing else changes until `seat` or `advance`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from llama_engine.model.attention import ByRow, attend_by_row, by_row
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint

SPAN_BUCKET = 64
"""Attention reads whole buckets of positions, so that the shapes of a step change rarely."""


class ModelRunner:
    """A decoder, its head and a slot cache. Not thread-safe: one pass at a time."""

    def __init__(self, checkpoint: Checkpoint, shape: KVCacheShape) -> None:
        self._device = checkpoint.info.device
        self._decoder = checkpoint.model.model
        self._head = checkpoint.model.lm_head
        self._attention = checkpoint.kernels.attention
        if self._attention is not None:
            attend_by_row(checkpoint.model)
        self._cache = KVCache(shape, self._device)
        self._columns = torch.arange(shape.max_model_len, device=self._device)
        # What each slot's next step reads: its last token, and the position that token has.
        self._tokens = torch.zeros(shape.slots, 1, dtype=torch.long, device=self._device)
        self._positions = torch.zeros(shape.slots, 1, dtype=torch.long, device=self._device)
        # What a padded step is told on the device: how many of its rows are rows.
        self._numbers = torch.arange(shape.slots, device=self._device)
        self._decoding = torch.zeros((), dtype=torch.long, device=self._device)

    def prefill(self, first: int, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read whole prompts into the slots `first` …; return their last tokens' hidden states, [rows, hidden].

        Prompts are padded on the right: a prompt token sees only what is left of it, so what a row computes for its
        padding reaches nobody, and what it writes to the cache there is overwritten before it can be seen.
        """
        width = max(map(len, prompts))
        # Padding is the row's own last token: a foreign one might overflow where the row's don't, and a NaN in the
        # cache is not hidden by a mask.
        tokens = [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts]
        positions = self._columns[:width].expand(len(prompts), width)
        # No mask: with nothing before it and the padding behind it, a prefill is plainly causal, which SDPA knows how
        # to do without the width x width booleans a row that a mask would take.
        hidden = self._forward(first, torch.tensor(tokens, device=self._device), positions, width, mask=None)
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self._device)
        return hidden[torch.arange(len(prompts), device=self._device), last]

    def prefill_chunk(self, slot: int, tokens: Sequence[int], start: int) -> torch.Tensor:
        """Read more of one prompt, at the positions `start` …; return its last token's hidden state, [1, hidden]."""
        end = start + len(tokens)
        positions = self._columns[None, start:end]
        mask = (self._columns[:end] <= positions[:, :, None])[:, None]
        return self._forward(slot, torch.tensor([tokens], device=self._device), positions, end, mask)[:, -1]

    def step(self, first: int, last: int, longest: int) -> torch.Tensor:
        """Run the last token of the slots `first` … `last` − 1; return hidden states, [rows, hidden].

        longest: the greatest number of positions that one of these slots holds already.
        """
        positions = self._positions[first:last]
        span = min(-(-(longest + 1) // SPAN_BUCKET) * SPAN_BUCKET, self._cache.shape.max_model_len)
        # A token sees its own position and everything before it.
        if self._attention is not None:
            rows = by_row(self._attention, positions[:, 0] + 1)
            return self._forward(first, self._tokens[first:last], positions, span, mask=None, rows=rows)[:, -1]
        # [rows, 1, 1, span].
        mask = (self._columns[:span] <= positions)[:, None, None]
        return self._forward(first, self._tokens[first:last], positions, span, mask)[:, -1]

    def padded_step(self, rows: int, span: int) -> torch.Tensor:
        """Do as `step` over the slots 0 … `rows` − 1, of which only the first `pad` are rows; [rows, hidden].

        All that changes from one call to the next it reads from tensors that stay where they are, so that the pass can
        be captured. span: of every row, more than the positions that one of the rows holds. What is said of padding is
        finite and reaches nobody. Only with a spare position in the cache.
        """
        active = self._active(rows)
        # A slot that isn't a row of this step may be another row's already: nothing of it may be overwritten, and the
        # token it has may be FAILED, which no embedding has.
        positions = torch.where(active, self._positions[:rows], self._cache.shape.max_model_len)
        tokens = torch.where(active, self._tokens[:rows], 0)
        if self._attention is not None:
            lengths = torch.where(active, positions + 1, 0)[:, 0]
            return self._forward(0, tokens, positions, span, mask=None, rows=by_row(self._attention, lengths))[:, -1]
        mask = (self._columns[:span] <= positions)[:, None, None]
        return self._forward(0, tokens, positions, span, mask)[:, -1]

    def padded_advance(self, rows: int, tokens: torch.Tensor) -> None:
        """Note the tokens, [rows], that the slots 0 … `rows` − 1 chose; the first `pad` of them had made a step."""
        self._positions[:rows] += self._active(rows)
        self._tokens[:rows, 0] = tokens

    def pad(self, decoding: int) -> None:
        """Say how many rows the next padded step has."""
        self._decoding.fill_(decoding)

    def _active(self, rows: int) -> torch.Tensor:
        """Return which of the first slots are rows of a padded step: [rows, 1], bool."""
        return (self._numbers[:rows] < self._decoding)[:, None]

    def rehearse(self) -> None:
        """Make a step of every kind that there is, so that nothing is left to compile when requests come.

        Kernels differ by the number of rows, in tiles, and by whether there is a long row. Only before any row is
        seated: what it writes to the cache is finite, and no row's.
        """
        slots, longest = self._cache.shape.slots, self._cache.shape.max_model_len - 1
        for rows in sorted({1, min(17, slots), min(33, slots), slots}):
            for length in (0, longest):
                self.logits(self.step(0, rows, length))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary] of [rows, hidden]."""
        logits: torch.Tensor = self._head(hidden)
        return logits

    def seat(self, first: int, lengths: Sequence[int]) -> None:
        """Note that the slots `first` … hold prompts of these lengths; their next token comes behind them."""
        self._positions[first : first + len(lengths), 0] = torch.tensor(lengths, device=self._device)

    def advance(self, stepped: int, tokens: torch.Tensor) -> None:
        """Note the tokens, [rows], that the first slots chose; the first `stepped` of them had made a step for it."""
        self._positions[:stepped] += 1
        self._tokens[: len(tokens), 0] = tokens

    def move(self, source: int, target: int, length: int) -> None:
        """Put what slot `source` holds, `length` positions, in the place of slot `target`."""
        self._cache.move(source, target, length)
        self._tokens[target] = self._tokens[source]
        self._positions[target] = self._positions[source]

    def wipe(self, first: int, last: int) -> None:
        """Zero the slots `first` … `last` − 1, so that nothing that isn't finite is left to their next rows."""
        for slot in range(first, last):
            self._cache.wipe(slot)

    def _forward(
        self,
        first: int,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        span: int,
        mask: torch.Tensor | None,
        rows: ByRow | None = None,
    ) -> torch.Tensor:
        """Run [rows, width] tokens at their positions in slots `first` …; return [rows, width, hidden].

        mask: [rows, 1, width, span], True where a token may look; None is causal over the pass itself. rows: what
        attends instead of a mask, where the width is 1.
        """
        self._cache.aim(first, positions, span)
        hidden: torch.Tensor = self._decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            **({} if rows is None else {"by_row": rows}),
        ).last_hidden_state
        return hidden
