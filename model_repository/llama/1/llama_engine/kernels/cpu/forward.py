"""Runs a Llama with the CPU kernels: `PackedLlama` holds packed weights, `CpuForward` a KV cache and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.rope import RopeTables
from llama_engine.checkpoint.weights import Embedding
from llama_engine.kernels.activation_terms import LINEAR_LAYERS, TWO_TERMS, ActivationTerms, TermCount, TermCounts
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.kernels.cpu.bindings import Cache, CpuKernels, Layer, Model, Scoring, address_of
from llama_engine.kernels.cpu.lora import LoraTable
from llama_engine.kernels.cpu.packing import (
    GROUP_UNIT,
    QUAD,
    TOKEN_MULTIPLE,
    PackedLayer,
    PackedLinear,
    QuantizedTokens,
    linear_shapes,
    pad_gain,
    padded,
    padded_head_dim,
)
from llama_engine.kernels.cpu.paged_cache import CACHE_TYPES, PagedCache
from llama_engine.kernels.lora_layout import NO_LORAS, LoraLimits

ROOM = 512
"""Default maximum of tokens computed at once."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""The kernels' numbers for the activations of the gate."""


@dataclass(frozen=True)
class PackedLlama:
    """The packed weights of a Llama; any number of `CpuForward` share them.

    norm: [hidden], the final norm's gain. head: includes the logits' scale. tables: RoPE's. terms: which activations
    have two INT8 terms.
    """

    kernels: CpuKernels
    architecture: Architecture
    embedding: Embedding
    layers: list[PackedLayer]
    norm: torch.Tensor
    head: PackedLinear
    tables: RopeTables
    terms: ActivationTerms = TWO_TERMS

    @property
    def padded_head_dim(self) -> int:
        """The head dimension of packed weights and KV cache."""
        return padded_head_dim(self.architecture)

    def scratch_bytes(self, shape: KVCacheShape) -> int:
        """Return an upper bound of the bytes of `CpuForward` beside a KV cache of this shape: scratch, page table."""
        architecture = self.architecture
        hidden, intermediate = padded(architecture.hidden), padded(architecture.intermediate)
        attended = padded(architecture.heads * self.padded_head_dim)
        qkv = padded((architecture.heads + 2 * architecture.kv_heads) * self.padded_head_dim)
        output = hidden if architecture.norm_after else 0
        floats = 4 * (qkv + attended + intermediate + output) * ROOM
        # `QuantizedTokens` have two bytes an input, 8 a quad, 8 a column group, and 16 a token.
        inputs = hidden + attended + intermediate
        terms = (2 * inputs + 8 * inputs // QUAD + 8 * inputs // GROUP_UNIT + 3 * 16) * padded(ROOM, TOKEN_MULTIPLE)
        stride = int(self.kernels.scratch_stride(shape.columns * shape.page_size, self.padded_head_dim))
        norm, page_table = 4 * hidden, 4 * shape.slots * shape.columns
        return floats + terms + 4 * stride * torch.get_num_threads() + norm + page_table

    def describe(self) -> str:
        """Return a description of the INT8 product, for the log."""
        return f"exact INT8, {self.terms.describe()}, by compiled {self.kernels.name.upper()} kernels"


class CpuForward:
    """The forward pass of a Llama on tokens of any sequences. Not thread-safe: one call at a time.

    A token's hidden state and logits have the same bits in any batch, for any chunking of its sequence, on any pages,
    and with any number of threads (torch.get_num_threads() at each call).

    cache: shape of the KV cache, with the padded head dimension. room: maximum tokens computed at once; calls with more
    tokens are split. loras: room for adapters.
    Raises ValueError if RoPE's tables are shorter than max_model_len, or the cache isn't this model's or has pages of
    another size than the kernels.
    """

    def __init__(self, llama: PackedLlama, cache: KVCacheShape, room: int = ROOM, loras: LoraLimits = NO_LORAS) -> None:
        shortest = min((len(cosine) for cosine, _ in llama.tables.values()), default=cache.max_model_len)
        if shortest < cache.max_model_len:
            raise ValueError(f"RoPE's tables have {shortest} positions, and sequences {cache.max_model_len}")
        of_cache = (cache.layers, cache.key_value_heads, cache.head_dim)
        of_model = (len(llama.layers), llama.architecture.kv_heads, llama.padded_head_dim)
        if of_cache != of_model:
            raise ValueError(f"the cache has layers, KV heads and dimensions {of_cache}, and the model {of_model}")
        self.llama = llama
        self.cache = PagedCache(cache)
        self.room = room
        architecture = llama.architecture
        self._width = padded(architecture.hidden)
        qkv, attended = llama.layers[0].query_key_value, llama.layers[0].attention_output
        self._qkv = torch.zeros(room, qkv.matrix.outputs)
        self._attended = torch.zeros(room, attended.matrix.inputs)
        self._gated = torch.zeros(room, padded(architecture.intermediate))
        self._output = torch.zeros(room, self._width) if architecture.norm_after else None
        widths = (
            (self._width, architecture.hidden),
            (self._attended.shape[1], architecture.heads * architecture.head_dim),
            (self._gated.shape[1], architecture.intermediate),
        )
        self.quantized = [QuantizedTokens(room, width, inputs, llama.terms) for width, inputs in widths]
        self._shapes = linear_shapes(architecture)
        self._counts = torch.zeros(len(LINEAR_LAYERS), 2, dtype=torch.int64)
        stride = llama.kernels.scratch_stride(cache.columns * cache.page_size, padded_head_dim(architecture))
        self._scratch = torch.zeros(torch.get_num_threads(), stride)
        self._tables = {
            kind: [table.detach().float().contiguous() for table in tables] for kind, tables in llama.tables.items()
        }
        self._norm = pad_gain(llama.norm)
        self.loras = LoraTable(architecture, cache.slots, room, loras)
        self._model = self._structure()

    def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Run all layers and return the hidden states before the final norm; x may be changed in place.

        x: [tokens, hidden] float32, the embeddings. slots: [tokens] int64, rows of the page table. positions: [tokens]
        int64. A sequence's tokens must be in ascending order of position, and its earlier ones must be in the KV cache.
        Raises IndexError for a slot or position outside the page table and for a position without a page, because the
        passes of the kernels don't check.
        """
        if (order := self.loras.order(slots)) is not None:
            result = torch.empty_like(x)
            result[order] = self.forward(x[order], slots[order], positions[order])
            return result
        slots, positions = slots.contiguous(), positions.contiguous()
        token = self.llama.kernels.find_without_page(self._model, slots.data_ptr(), positions.data_ptr(), len(slots))
        if token >= 0:
            self.cache.refuse(int(slots[token]), int(positions[token]))
        hidden = self.llama.architecture.hidden
        padded_x = self._pad(x)
        for start in range(0, len(x), self.room):
            parts = [tensor[start : start + self.room] for tensor in (padded_x, slots, positions)]
            pointers = (part.data_ptr() for part in parts)
            self.llama.kernels.forward(self._model, *pointers, len(parts[0]), self._use_threads())
        return padded_x if hidden == self._width else padded_x[:, :hidden]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits [tokens, vocabulary] float32 of hidden states x [tokens, hidden], final norm included."""
        padded_x = self._pad(x)
        result = torch.empty(len(x), self.llama.head.matrix.outputs)
        for start in range(0, len(x), self.room):
            part, logits = (tensor[start : start + self.room] for tensor in (padded_x, result))
            self.llama.kernels.logits(
                self._model, part.data_ptr(), len(part), logits.data_ptr(), torch.get_num_threads()
            )
        return result[:, : self.llama.architecture.vocabulary]

    def attention(
        self, qkv: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, layer: int = 0
    ) -> torch.Tensor:
        """Return the attention [tokens, heads, head_dim] of one layer, for verification.

        qkv: [tokens, heads + 2 · KV heads, head_dim], before norms and RoPE; keys and values are written to the cache.
        """
        architecture = self.llama.architecture
        tokens, dim = len(qkv), architecture.head_dim
        wide = functional.pad(qkv, (0, padded_head_dim(architecture) - dim)).flatten(1)
        self._qkv[:tokens, : wide.shape[1]] = wide
        slots, positions = slots.contiguous(), positions.contiguous()
        self.llama.kernels.attention(
            self._model, layer, slots.data_ptr(), positions.data_ptr(), tokens, self._use_threads()
        )
        attended = self._attended[:tokens, : architecture.heads * padded_head_dim(architecture)]
        return attended.view(tokens, architecture.heads, -1)[:, :, :dim].clone()

    def take_term_counts(self) -> TermCounts:
        """Return the counts since the last call."""
        result = {}
        for name, (tokens, quads) in zip(LINEAR_LAYERS, self._counts.tolist(), strict=True):
            outputs, inputs = self._shapes[name]
            result[name] = TermCount(tokens, QUAD * quads, inputs, outputs)
        self._counts.zero_()
        return result

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        padding = self._width - x.shape[1]
        return (functional.pad(x, (0, padding)) if padding else x).contiguous()

    def _use_threads(self) -> int:
        """Return torch's number of threads, for which there is scratch memory."""
        threads = torch.get_num_threads()
        if threads > len(self._scratch):
            self._scratch = torch.zeros(threads, self._scratch.shape[1])
            self._model.scratch = self._scratch.data_ptr()
        return threads

    def _layer(self, index: int) -> Layer:
        architecture, layer = self.llama.architecture, self.llama.layers[index]
        kind = architecture.ropes[index]
        cosine, sine = (None, None) if kind is None else self._tables[kind]
        return Layer(
            address_of(layer.attention_norm),
            address_of(layer.attention_output_norm),
            address_of(layer.query_norm),
            address_of(layer.key_norm),
            layer.query_key_value.matrix,
            layer.attention_output.matrix,
            address_of(layer.mlp_norm),
            address_of(layer.mlp_output_norm),
            layer.gate_up.matrix,
            layer.down.matrix,
            Cache(*(tensor.data_ptr() for tensor in self.cache.layers[index])),
            address_of(cosine),
            address_of(sine),
            architecture.windows[index] or 0,
        )

    def _structure(self) -> Model:
        architecture, cache = self.llama.architecture, self.cache.shape
        layers = (Layer * len(self.llama.layers))(*map(self._layer, range(len(self.llama.layers))))
        return Model(
            layers=len(layers),
            hidden=architecture.hidden,
            heads=architecture.heads,
            kv_heads=architecture.kv_heads,
            head_dim=padded_head_dim(architecture),
            unpadded_head_dim=architecture.head_dim,
            rotary=architecture.rotary,
            norm_of_all_heads=architecture.query_key_norm == "projection",
            activation=ACTIVATIONS[architecture.activation],
            cache_type=CACHE_TYPES[cache.dtype],
            epsilon=architecture.epsilon,
            scoring=Scoring(architecture.scaling, architecture.attention_softcap or 0.0),
            logits_softcap=architecture.logits_softcap or 0.0,
            page_table=self.cache.page_table.data_ptr(),
            slots=cache.slots,
            columns=cache.columns,
            pages=cache.pages + 1,
            positions=cache.max_model_len,
            norm=self._norm.data_ptr(),
            head=self.llama.head.matrix,
            layer=layers,
            qkv=self._qkv.data_ptr(),
            attended=self._attended.data_ptr(),
            gated=self._gated.data_ptr(),
            output=address_of(self._output),
            hidden_terms=self.quantized[0].structure,
            attended_terms=self.quantized[1].structure,
            gated_terms=self.quantized[2].structure,
            counts=self._counts.data_ptr(),
            adapters=self.loras.adapters.data_ptr(),
            loras=self.loras.table,
            lora_shrunk=self.loras.shrunk.data_ptr(),
            lora_stride=self.loras.shrunk.shape[1],
            scratch=self._scratch.data_ptr(),
            scratch_stride=self._scratch.shape[1],
        )
