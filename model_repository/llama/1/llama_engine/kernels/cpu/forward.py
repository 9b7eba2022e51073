"""Runs a Llama with the CPU kernels: `CpuLlama` holds packed weights, `CpuForward` a KV cache and scratch memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from llama_engine.kernels.cpu.library import CpuKernels, use_huge_pages
from llama_engine.kernels.cpu.packing import (
    ROWS,
    Dimensions,
    PackedLayer,
    PackedLinear,
    QuantizedRows,
    pad_gain,
    padded,
)
from llama_engine.kernels.cpu.structures import Cache, Layer, Model
from llama_engine.model.activation_terms import TWO_TERMS, ActivationTerms, TermCount, TermCounts
from llama_engine.model.kv_cache import CPU_PAGE_SIZE, KVCacheShape

ROOM = 512
"""Default maximum of tokens computed at once."""

CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The kernels' numbers for the dtypes of the KV cache."""


@dataclass(frozen=True)
class CpuLlama:
    """The packed weights of a Llama; any number of `CpuForward` share them.

    norm: [hidden], the final norm's gain. cosine, sine: [positions, head_dim / 2], tables of RoPE. terms: which
    activation rows have two INT8 terms.
    """

    kernels: CpuKernels
    dimensions: Dimensions
    layers: list[PackedLayer]
    norm: torch.Tensor
    head: PackedLinear
    cosine: torch.Tensor
    sine: torch.Tensor
    terms: ActivationTerms = TWO_TERMS


def scratch_bytes(llama: CpuLlama, positions: int, room: int) -> int:
    """Return an upper bound of `CpuForward`'s scratch bytes. positions: per sequence. room: tokens computed at once."""
    dimensions = llama.dimensions
    hidden, intermediate = padded(dimensions.hidden), padded(dimensions.intermediate)
    attended = padded(dimensions.heads * dimensions.padded_head_dim)
    qkv = padded((dimensions.heads + 2 * dimensions.kv_heads) * dimensions.padded_head_dim)
    floats = 4 * (qkv + attended + intermediate) * room
    terms = (2 * (hidden + attended + intermediate) + 3 * 21) * padded(room, ROWS)
    stride = llama.kernels.scratch_stride(positions, dimensions.padded_head_dim)
    norm = 4 * hidden
    return floats + terms + 4 * stride * torch.get_num_threads() + norm


class CpuForward:
    """The forward pass of a Llama on tokens of any sequences. Not thread-safe: one call at a time.

    A token's hidden state and logits have the same bits in any batch, for any chunking of its sequence, on any pages,
    and with any number of threads (torch.get_num_threads() at each call).

    cache: shape of the KV cache, with the padded head dimension. room: maximum tokens computed at once; calls with more
    tokens are split. Raises ValueError if RoPE's tables are shorter than max_model_len, or the cache isn't this model's
    or has pages of another size than the kernels.
    """

    def __init__(self, llama: CpuLlama, cache: KVCacheShape, room: int = ROOM) -> None:
        if len(llama.cosine) < cache.max_model_len:
            raise ValueError(f"RoPE's tables have {len(llama.cosine)} positions, and sequences {cache.max_model_len}")
        if cache.page_size != CPU_PAGE_SIZE:
            raise ValueError(f"the cache has pages of {cache.page_size} positions, and the kernels of {CPU_PAGE_SIZE}")
        of_cache = (cache.layers, cache.key_value_heads, cache.head_dim)
        of_model = (len(llama.layers), llama.dimensions.kv_heads, llama.dimensions.padded_head_dim)
        if of_cache != of_model:
            raise ValueError(f"the cache has layers, KV heads and dimensions {of_cache}, and the model {of_model}")
        self.llama = llama
        self.cache = cache
        self.room = room
        dimensions = llama.dimensions
        self._width = padded(dimensions.hidden)
        self.layer_caches = [self._allocate_cache() for _ in llama.layers]
        self._page_table = torch.zeros(cache.slots, cache.columns, dtype=torch.int32)
        qkv, attended = llama.layers[0].query_key_value, llama.layers[0].attention_output
        self._qkv = torch.zeros(room, len(qkv.weight))
        self._attended = torch.zeros(room, attended.weight.shape[1])
        self._gated = torch.zeros(room, padded(dimensions.intermediate))
        widths = (
            (self._width, dimensions.hidden),
            (self._attended.shape[1], dimensions.heads * dimensions.head_dim),
            (self._gated.shape[1], dimensions.intermediate),
        )
        self.quantized = [QuantizedRows(room, width, llama.terms.limit(inputs)) for width, inputs in widths]
        # In the order of the kernels' enumeration of linear layers.
        self._shapes = dimensions.linear_shapes
        self._counts = torch.zeros(len(self._shapes), 2, dtype=torch.int64)
        stride = llama.kernels.scratch_stride(cache.columns * cache.page_size, dimensions.padded_head_dim)
        self._threads = torch.get_num_threads()
        self._scratch = torch.zeros(self._threads, stride)
        self._tables = [table.detach().float().contiguous() for table in (llama.cosine, llama.sine)]
        self._norm = pad_gain(llama.norm)
        self._model = self._structure()

    def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run all layers and return the hidden states before the final norm; x may be changed in place.

        x: [tokens, hidden] float32, the embeddings. slots: [tokens] int64, rows of the page table. positions: [tokens]
        int64. A sequence's tokens must be in ascending order of position, and its earlier positions must be cached.
        Raises IndexError for a slot or position outside the page table and for a position without a page, because the
        passes of the kernels don't check.
        """
        slots, positions = slots.contiguous(), positions.contiguous()
        self._check_pages(slots, positions)
        hidden = self.llama.dimensions.hidden
        padded_x = self._pad(x)
        for start in range(0, len(x), self.room):
            part = slice(start, start + self.room)
            self._use_threads()
            self.llama.kernels.forward(self._model, padded_x[part], slots[part], positions[part])
        return padded_x if hidden == self._width else padded_x[:, :hidden]

    def set_pages(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Set the entries of a slot's row of the page table from column `first` on. Page 0 is the null page.

        Raises IndexError for entries outside the table or pages outside the pool.
        """
        if not pages:
            return
        last = first + len(pages) - 1
        _check_range("slot", slot, slot, self.cache.slots)
        _check_range("column", first, last, self.cache.columns)
        _check_range("page", min(pages), max(pages), self.cache.pages + 1)
        self._page_table[slot, first : last + 1] = torch.tensor(pages, dtype=torch.int32)

    def copy(self, source: int, target: int) -> None:
        """Copy the keys and values of page `source` to page `target`, in every layer.

        Raises IndexError for a page outside the pool.
        """
        _check_range("page", min(source, target), max(source, target), self.cache.pages + 1)
        for tensors in self.layer_caches:
            for tensor in tensors:
                tensor[:, target] = tensor[:, source]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] float32 of hidden states x [tokens, hidden], final norm included."""
        padded_x = self._pad(x)
        result = torch.empty(len(x), len(self.llama.head.weight))
        for start in range(0, len(x), self.room):
            part = slice(start, start + self.room)
            self.llama.kernels.logits(self._model, padded_x[part], result[part])
        return result[:, : self.llama.dimensions.vocabulary]

    def attention(
        self, qkv: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, layer: int = 0
    ) -> torch.Tensor:
        """Return the attention [tokens, heads, head_dim] of one layer, for verification.

        qkv: [tokens, heads + 2 · KV heads, head_dim], before RoPE; keys and values are written to the cache.
        """
        dimensions = self.llama.dimensions
        tokens, dim = len(qkv), dimensions.head_dim
        wide = functional.pad(qkv, (0, dimensions.padded_head_dim - dim)).flatten(1)
        self._qkv[:tokens, : wide.shape[1]] = wide
        self._use_threads()
        self.llama.kernels.attention(self._model, layer, slots.contiguous(), positions.contiguous())
        attended = self._attended[:tokens, : dimensions.heads * dimensions.padded_head_dim]
        return attended.view(tokens, dimensions.heads, -1)[:, :, :dim].clone()

    def take_term_counts(self) -> TermCounts:
        """Return the counts since the last call."""
        counts = zip(self._shapes.items(), self._counts.tolist(), strict=True)
        result = {name: TermCount(rows, two, outputs * inputs) for (name, (outputs, inputs)), (rows, two) in counts}
        self._counts.zero_()
        return result

    def _check_pages(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Raise IndexError unless every token has a page."""
        token = self.llama.kernels.find_without_page(self._model, slots, positions)
        if token < 0:
            return
        slot, position = int(slots[token]), int(positions[token])
        _check_range("slot", slot, slot, self.cache.slots)
        _check_range("position", position, position, self.cache.max_model_len)
        raise IndexError(f"position {position} of slot {slot} has no page")

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        padding = self._width - x.shape[1]
        return (functional.pad(x, (0, padding)) if padding else x).contiguous()

    def _use_threads(self) -> None:
        """Enlarge the scratch memory if torch has more threads than before."""
        if torch.get_num_threads() > self._threads:
            self._threads = torch.get_num_threads()
            self._scratch = torch.zeros(self._threads, self._scratch.shape[1])
            self._model.scratch = self._scratch.data_ptr()

    def _allocate_cache(self) -> list[torch.Tensor]:
        """Allocate the KV cache of a layer: keys, values, and for int8 their scales."""
        cache = self.cache
        heads = (cache.key_value_heads, cache.pages + 1, cache.page_size)
        tensors = [torch.empty(*heads, cache.head_dim, dtype=cache.dtype) for _ in range(2)]
        if cache.dtype == torch.int8:
            tensors += [torch.empty(heads) for _ in range(2)]
        for tensor in tensors:
            use_huge_pages(tensor)
            tensor.zero_()
        return tensors

    def _structure(self) -> Model:
        dimensions = self.llama.dimensions
        layers = (Layer * len(self.llama.layers))(
            *(
                Layer(
                    layer.attention_norm.data_ptr(),
                    layer.query_key_value.matrix,
                    layer.attention_output.matrix,
                    layer.mlp_norm.data_ptr(),
                    layer.gate_up.matrix,
                    layer.down.matrix,
                    Cache(*(tensor.data_ptr() for tensor in tensors)),
                )
                for layer, tensors in zip(self.llama.layers, self.layer_caches, strict=True)
            )
        )
        return Model(
            layers=len(layers),
            hidden=dimensions.hidden,
            heads=dimensions.heads,
            kv_heads=dimensions.kv_heads,
            head_dim=dimensions.padded_head_dim,
            rotary=dimensions.head_dim,
            cache_type=CACHE_TYPES[self.cache.dtype],
            epsilon=dimensions.epsilon,
            scaling=dimensions.scaling,
            page_table=self._page_table.data_ptr(),
            slots=self.cache.slots,
            columns=self.cache.columns,
            pages=self.cache.pages + 1,
            positions=self.cache.max_model_len,
            cosine=self._tables[0].data_ptr(),
            sine=self._tables[1].data_ptr(),
            norm=self._norm.data_ptr(),
            head=self.llama.head.matrix,
            layer=layers,
            qkv=self._qkv.data_ptr(),
            attended=self._attended.data_ptr(),
            gated=self._gated.data_ptr(),
            hidden_terms=self.quantized[0].structure,
            attended_terms=self.quantized[1].structure,
            gated_terms=self.quantized[2].structure,
            counts=self._counts.data_ptr(),
            scratch=self._scratch.data_ptr(),
            scratch_stride=self._scratch.shape[1],
        )


def _check_range(what: str, lowest: int, highest: int, bound: int) -> None:
    if lowest < 0 or highest >= bound:
        raise IndexError(f"{what} {lowest if lowest < 0 else highest} is outside the KV cache of {bound} {what}s")
