"""The model runner in PyTorch: `Llama.forward` over `KVCache`, with attention for a CPU and for a GPU.

On a CPU each chunk attends on its own, over exactly its own positions, so that neither its time nor its bits depend on
other rows; a decode step's rows are chunks of one token. On a GPU a call per row would be launch-bound: a decode step
is one call for all rows, fused, or PyTorch's with a mask over the longest row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import functional

from llama_engine.kernels.selection import DecodeAttention
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.llama import Llama
from llama_engine.model.model_runner import Chunk


class Extent(NamedTuple):
    """A chunk without its tokens. mask: [length, start + length], which positions its tokens attend to; None is causal
    over the chunk itself, or everything for one token.
    """

    slot: int
    start: int
    length: int
    mask: torch.Tensor | None = None


class TorchRunner:
    """A Llama and its KV cache. Not thread-safe: one pass at a time."""

    def __init__(self, model: Llama, shape: KVCacheShape, decode_attention: DecodeAttention | None = None) -> None:
        """decode_attention: fused, of a decode step on a GPU; None is PyTorch's."""
        self.model = model
        self.device = model.embedding.device
        self.kv_cache = KVCache(shape, self.device)
        self._dtype = model.embedding.dtype
        self._scaling = model.head_dim**-0.5
        # A fused kernel reads the cache in the dtype of the queries.
        self._decode_attention = decode_attention if shape.dtype == self._dtype else None
        spare = bool(shape.spare)
        self._attends_alone = self.device.type == "cpu" and not spare and self._decode_attention is None
        self._columns = torch.arange(shape.positions, device=self.device)

    def prefill(self, chunks: Sequence[Chunk], every: bool = False) -> torch.Tensor:
        """Write chunks to their slots; return the hidden states of their last tokens, [chunks, hidden].

        every: those of all their tokens instead, [tokens, hidden].
        """
        extents = [self._extent(chunk) for chunk in chunks]
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens], device=self.device)
        positions = torch.cat([self._columns[one.start : one.start + one.length] for one in extents])
        lengths = torch.tensor([one.length for one in extents], device=self.device)
        slots = torch.tensor([one.slot for one in extents], device=self.device)
        slots = slots.repeat_interleave(lengths, output_size=len(tokens))
        hidden = self._run(tokens, slots, positions, partial(self._attend_chunks, extents))
        return hidden if every else hidden[lengths.cumsum(0) - 1]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of a slot's first positions to another slot."""
        self.kv_cache.copy(source, target, length)

    def decode(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Run one token per row; return hidden states, [rows, hidden].

        span: exceeds every position that is not padding. A position of max_model_len marks a padding row of a captured
        step: it writes to the cache's spare position, and its output is discarded.
        """
        if self._attends_alone:
            extents = [Extent(slot, start, 1) for slot, start in zip(slots.tolist(), positions.tolist(), strict=True)]
            return self._run(tokens, slots, positions, partial(self._attend_chunks, extents))
        return self._run(tokens, slots, positions, partial(self._attend_rows, slots, positions, span))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return [rows, vocabulary] of [rows, hidden]."""
        return self.model.logits(hidden)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run decode steps of every shape class, so that no kernel is compiled when requests come.

        Kernels differ by the number of rows, in tiles, and by the presence of a long row. Only while no slot is in use:
        the steps write to the cache, finite values and no sequence's.
        """
        shape = self.kv_cache.shape
        for rows in sorted({1, min(17, shape.slots), min(33, shape.slots), shape.slots}):
            slots, tokens = self._columns.new_tensor(range(rows)), self._columns.new_zeros(rows)
            for position in (0, shape.max_model_len - 1):
                self.logits(self.decode(slots, tokens, torch.full_like(tokens, position), position + 1))

    def _extent(self, chunk: Chunk) -> Extent:
        slot, start, length = chunk.slot, chunk.start, len(chunk.tokens)
        if start == 0 or length == 1:
            return Extent(slot, start, length)
        mask = self._columns[: start + length] <= self._columns[start : start + length, None]
        return Extent(slot, start, length, mask)

    def _run(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the hidden states of tokens [n]. attend: (layer, query [n, heads, dim]), after the cache's write."""

        def write_and_attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self.kv_cache.write(layer, slots, positions, key, value)
            return attend(layer, query)

        return self.model.forward(tokens, positions, write_and_attend)

    def _attend_chunks(self, extents: Sequence[Extent], layer: int, query: torch.Tensor) -> torch.Tensor:
        """Attention of tokens [n], chunk by chunk, each over its slot's positions up to its own."""
        attended = torch.empty_like(query)
        for extent, end in zip(extents, accumulate(extent.length for extent in extents), strict=True):
            rows = slice(end - extent.length, end)
            attended[rows] = self._attend_chunk(layer, extent, query[rows])
        return attended

    def _attend_chunk(self, layer: int, extent: Extent, query: torch.Tensor) -> torch.Tensor:
        """Attention [length, heads, dim] of the tokens of one chunk."""
        _, heads, dim = query.shape
        keys, values = self.kv_cache.read(layer, extent.slot, extent.start + extent.length, query.dtype)
        if extent.length == 1:
            # The query heads that share a KV head are like tokens without a mask: K and V are read once.
            grouped = query.view(len(keys), -1, dim)
            if query.dtype != torch.float32:
                attended = functional.scaled_dot_product_attention(grouped[None], keys[None], values[None])
            else:
                # SDPA cuts a row among the threads, and its bits depend on their number; these products don't.
                weights = torch.bmm(grouped, keys.transpose(1, 2)).mul_(self._scaling).softmax(-1)
                attended = torch.bmm(weights, values)
            return attended.reshape(1, heads, dim)
        group = heads // len(keys)
        if extent.mask is not None and group > 1:
            # On a GPU, SDPA with a mask and grouped heads falls back to a kernel that stores all scores.
            keys, values, group = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0), 1
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=extent.mask,
            is_causal=extent.mask is None,
            enable_gqa=group > 1,
        )
        return attended[0].transpose(0, 1)

    def _attend_rows(
        self, slots: torch.Tensor, positions: torch.Tensor, span: int, layer: int, query: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one token per row, all rows in one call."""
        if self._decode_attention is not None:
            lengths = torch.where(positions < self.kv_cache.shape.max_model_len, positions + 1, 0)
            keys, values = self.kv_cache.keys[layer, :, :, :span], self.kv_cache.values[layer, :, :, :span]
            return self._decode_attention(query, keys, values, slots, lengths, self._scaling)
        # [rows, span]: a token attends to its own position and everything before it.
        held = self._columns[:span] <= positions[:, None]
        keys, values = self.kv_cache.gather(layer, slots, held, query.dtype)
        grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        return functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=held[:, None, None]).flatten(
            1, 2
        )
