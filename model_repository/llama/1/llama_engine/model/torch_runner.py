"""The model runner in PyTorch: `Llama.forward` over `KVCache`, with attention for CPUs and GPUs.

Each chunk takes one call, over a copy of the sequence's pages. On a CPU so does each sequence of a decode step;
on a GPU that would be launch-bound, and all take one call with a mask over the longest sequence. With FlashAttention a
pass takes one call, which reads the pages where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn import functional

from llama_engine.kernels.activation_terms import TermCounts
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.kernels.final_norm import final_norm
from llama_engine.kernels.gpu.varlen_attention import Layout, VarlenAttention, layout_of
from llama_engine.kernels.lora_layout import NO_LORAS, LoraLimits
from llama_engine.kernels.transfers import lists_to_device
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.llama import Llama, softcap
from llama_engine.model.model_runner import TokenChunk
from llama_engine.model.torch_loras import TorchLoras


class Extent(NamedTuple):
    """Consecutive positions of a slot: a chunk or a single token.

    masks: which positions the tokens of a chunk attend to, by a layer's window, [length, start + length], bool. Without
    a mask, attention is causal within the chunk, or that of a single token.
    """

    slot: int
    start: int
    length: int
    masks: Mapping[int | None, torch.Tensor] = {}


class TorchRunner:
    """Runs a Llama over a KV cache of its own. Not thread-safe: one pass at a time."""

    def __init__(
        self,
        model: Llama,
        shape: KVCacheShape,
        attention: VarlenAttention | None = None,
        captured: bool = False,
        loras: LoraLimits = NO_LORAS,
    ) -> None:
        """Allocate the KV cache. attention: FlashAttention for a GPU; None uses PyTorch's SDPA on copies of pages.

        captured: whether decode steps are captured as CUDA graphs. A captured step can't read a tensor's value on the
        host, so that it computes all sequences in one call with a mask, on a CPU (in tests), too. loras: room for
        adapters.
        """
        self.model = model
        self.device = model.embedding.device
        self.cache = KVCache(shape, self.device)
        self.loras = TorchLoras(model.architecture, shape.slots, loras, self.device, always=captured)
        self._dtype = model.embedding.dtype
        self._scaling, self._softcap = model.architecture.scaling, model.architecture.attention_softcap
        self._windows = model.architecture.windows
        # FlashAttention requires the cache to have the dtype of the queries.
        self._attention = attention if shape.dtype == self._dtype else None
        self._attends_alone = self.device.type == "cpu" and not captured and self._attention is None
        self._positions = torch.arange(shape.max_model_len, device=self.device)
        # `Layout.first` of a decode step, where every sequence has one query.
        self._first = torch.arange(shape.slots + 1, dtype=torch.int32, device=self.device)

    def run_chunks(self, chunks: Sequence[TokenChunk], every: bool = False) -> torch.Tensor:
        """Compute chunks of tokens and cache them; see `ModelRunner`."""
        counts = [len(chunk.tokens) for chunk in chunks]
        if self._attention is not None:
            ends = [chunk.start + count for chunk, count in zip(chunks, counts, strict=True)]
            layout = layout_of([chunk.slot for chunk in chunks], counts, ends, self.cache.page_table)
            attend = partial(self._attend_layout, layout)
        else:
            extents = [self._extent(chunk) for chunk in chunks]
            attend = partial(self._attend_each, self._attend_chunk, extents)
        # Copy all of them to the device at once, before the pass is launched.
        tokens, slots, positions, last = lists_to_device(
            (
                [token for chunk in chunks for token in chunk.tokens],
                [chunk.slot for chunk in chunks for _ in chunk.tokens],
                [chunk.start + index for chunk in chunks for index in range(len(chunk.tokens))],
                [end - 1 for end in accumulate(counts)],
            ),
            self.device,
            torch.int64,
        )
        hidden = self._run(tokens, slots, positions, attend)
        return hidden if every else hidden[last]

    def decode(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Run a decode step; see `ModelRunner`.

        The position max_model_len marks padding of a captured step: it writes to the null page.
        """
        if self._attends_alone:
            extents = [Extent(slot, start, 1) for slot, start in zip(slots.tolist(), positions.tolist(), strict=True)]
            return self._run(tokens, slots, positions, partial(self._attend_each, self._attend_token, extents))
        if self._attention is not None:
            # Padding attends to a single position, with arbitrary values.
            lengths = torch.where(positions < self.cache.shape.max_model_len, positions + 1, 1).int()
            layout = Layout(self.cache.page_table[slots], self._first[: len(slots) + 1], lengths, 1, span)
            return self._run(tokens, slots, positions, partial(self._attend_layout, layout))
        return self._run(tokens, slots, positions, partial(self._attend_batch, slots, positions, span))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden]."""
        return self.model.logits(hidden)

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [n, hidden] after the final norm; see `ModelRunner`."""
        return final_norm(hidden, self.model.norm, self.model.architecture.epsilon)

    def take_term_counts(self) -> TermCounts:
        """Return nothing: only the compiled kernels count terms."""
        return {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run decode steps of several sizes, so that libraries load their kernels before requests arrive.

        No slot may have had pages yet, so that the steps write to the null page.
        """
        shape = self.cache.shape
        for size in sorted({1, min(17, shape.slots), min(33, shape.slots), shape.slots}):
            slots, tokens = self._positions.new_tensor(range(size)), self._positions.new_zeros(size)
            for position in (0, shape.max_model_len - 1):
                self.logits(self.decode(slots, tokens, torch.full_like(tokens, position), position + 1))

    def _extent(self, chunk: TokenChunk) -> Extent:
        slot, start, length = chunk.slot, chunk.start, len(chunk.tokens)
        if length == 1:
            return Extent(slot, start, length)
        masked = [window for window in set(self._windows) if start > 0 or (window or length) < length]
        return Extent(slot, start, length, {window: self._mask(start, start + length, window) for window in masked})

    def _mask(self, start: int, end: int, window: int | None) -> torch.Tensor:
        """Return which of the positions [0, end) the positions [start, end) attend to, [end - start, end].

        window: number of positions that each attends to; None is all.
        """
        keys, queries = self._positions[:end], self._positions[start:end, None]
        causal = keys <= queries
        return causal if window is None else causal & (keys > queries - window)

    def _run(
        self,
        tokens: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return the hidden states [n, hidden] of tokens [n].

        attend: (layer, query [n, heads, dim]) → [n, heads, dim], called after the layer's keys and values are written.
        """

        places = self.cache.places(slots, positions)

        def write_and_attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            self.cache.write(layer, places, key, value)
            return attend(layer, query)

        return self.model.forward(tokens, positions, write_and_attend, self.loras.of_pass(slots))

    def _attend_layout(self, layout: Layout, layer: int, query: torch.Tensor) -> torch.Tensor:
        """Return the attention [n, heads, dim] of all sequences of a pass, in one call."""
        assert self._attention is not None
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        return self._attention(query, keys, values, layout, self._scaling, self._windows[layer])

    def _attend_each(
        self,
        attend: Callable[[int, Extent, torch.Tensor], torch.Tensor],
        extents: Sequence[Extent],
        layer: int,
        query: torch.Tensor,
    ) -> torch.Tensor:
        """Return the attention [n, heads, dim] of n tokens, one call of `attend` per extent."""
        attended = torch.empty_like(query)
        for extent, end in zip(extents, accumulate(extent.length for extent in extents), strict=True):
            tokens = slice(end - extent.length, end)
            attended[tokens] = attend(layer, extent, query[tokens])
        return attended

    def _attend_token(self, layer: int, extent: Extent, query: torch.Tensor) -> torch.Tensor:
        """Return the attention [1, heads, dim] of one token over its slot's positions up to its own."""
        length, window = extent.start + 1, self._windows[layer]
        begin = 0 if window is None else max(0, length - window)
        keys, values = self.cache.read(layer, extent.slot, length, query.dtype, begin)
        # Treat the query heads of a KV head as tokens without a mask, so that keys and values are read once.
        grouped = query.view(len(keys), -1, query.shape[-1])
        return self._attend(grouped[None], keys[None], values[None]).reshape(query.shape)

    def _attend_chunk(self, layer: int, extent: Extent, query: torch.Tensor) -> torch.Tensor:
        """Return the attention [length, heads, dim] of one chunk."""
        if extent.length == 1:
            return self._attend_token(layer, extent, query)
        length = extent.start + extent.length
        keys, values = self.cache.read(layer, extent.slot, length, query.dtype)
        mask, group = extent.masks.get(self._windows[layer]), query.shape[1] // len(keys)
        if self._softcap is not None:
            mask = self._mask(extent.start, length, None) if mask is None else mask
        queries = query.transpose(0, 1)
        if mask is None:
            attended = functional.scaled_dot_product_attention(
                queries[None], keys[None], values[None], is_causal=True, scale=self._scaling, enable_gqa=group > 1
            )
            return attended[0].transpose(0, 1)
        # One query head of each KV head a call: with a mask and grouped heads, SDPA falls back to a kernel that stores
        # all scores, and repeated keys and values would take `group` times their memory.
        grouped = queries.view(len(keys), group, *queries.shape[1:])
        heads = [self._attend(grouped[None, :, head], keys[None], values[None], mask) for head in range(group)]
        return torch.stack(heads, 2)[0].flatten(0, 1).transpose(0, 1)

    def _attend_batch(
        self, slots: torch.Tensor, positions: torch.Tensor, span: int, layer: int, query: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention [batch, heads, dim] of one token per sequence, in one call with a mask."""
        # [batch, span]: a token attends to its own position and everything before it.
        held = self._positions[:span] <= positions[:, None]
        keys, values = self.cache.gather(layer, slots, held, query.dtype)
        grouped = query.view(len(query), keys.shape[1], -1, query.shape[-1])
        mask, window = held, self._windows[layer]
        if window is not None:
            # The position of padding is beyond the span, and its window must not be empty.
            mask = held & (self._positions[:span] > positions[:, None].clamp(max=span - 1) - window)
        return self._attend(grouped, keys, values, mask[:, None, None]).flatten(1, 2)

    def _attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return softmax(query · keysᵀ · scaling) · values, [..., heads, n, dim], for n queries of each head.

        keys, values: [..., heads, positions, dim]. mask: [..., n, positions], bool, the positions that a query attends
        to; None is all. The soft cap of the scores, which SDPA lacks, takes separate operations.
        """
        if self._softcap is None:
            return functional.scaled_dot_product_attention(query, keys, values, mask, scale=self._scaling)
        scores = softcap(query @ keys.transpose(-1, -2) * self._scaling, self._softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
