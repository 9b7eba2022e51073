"""The model runner for INT8 weights on a CPU, with the compiled kernels of `kernels/cpu`.

A pass takes a flat list of tokens with their slots and positions. The order of summation is fixed, and a token's result
depends on its own sequence only: its bits are the same in any batch and for any chunking of its prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.rope import RopeTables
from llama_engine.checkpoint.weight_reader import WeightReader
from llama_engine.checkpoint.weights import Embedding, LinearWeight
from llama_engine.kernels.activation_terms import ActivationTerms, TermCounts
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.kernels.cpu.bindings import CpuKernels
from llama_engine.kernels.cpu.forward import CpuForward, PackedLlama
from llama_engine.kernels.cpu.packing import pack_head, pack_layer, pack_linear
from llama_engine.kernels.final_norm import final_norm
from llama_engine.kernels.lora_layout import NO_LORAS, LoraLimits
from llama_engine.model.builder import ReadWeights
from llama_engine.model.model_runner import TokenChunk


def build_packed_llama(
    reader: WeightReader,
    architecture: Architecture,
    tables: RopeTables,
    terms: ActivationTerms,
    kernels: CpuKernels,
    read: ReadWeights,
) -> PackedLlama:
    """Read an INT8 checkpoint and pack it for the compiled kernels.

    terms: which activations have two 8-bit terms.
    """
    embedding = reader.packed_embedding()
    read.tensor(embedding.rows)
    layers = read.layers(reader, architecture.layers, partial(pack_layer, kernels, architecture))
    norm = read.tensor(reader.norm())
    head = pack_head(kernels, architecture, read.linear(reader.head()))
    return PackedLlama(kernels, architecture, embedding, layers, norm, head, tables, terms)


def packed_without_weights(
    architecture: Architecture, tables: RopeTables, terms: ActivationTerms, kernels: CpuKernels
) -> PackedLlama:
    """Return a model without layers: the memory plan takes the description and the sizes of `build_packed_llama`'s."""
    head = pack_linear(kernels, LinearWeight(torch.zeros(1, 1, dtype=torch.int8), torch.ones(1)))
    nothing = torch.empty(0)
    return PackedLlama(kernels, architecture, Embedding(nothing), [], nothing, head, tables, terms)


class CpuRunner:
    """Runs a model with packed weights (the CPU kernels' layout); owns its KV cache. Not thread-safe."""

    def __init__(self, model: PackedLlama, shape: KVCacheShape, loras: LoraLimits = NO_LORAS) -> None:
        self._embedding, self._scale = model.embedding, model.architecture.embedding_scale
        self._norm, self._epsilon = model.norm, model.architecture.epsilon
        self._forward = CpuForward(model, shape, loras=loras)
        self.cache, self.loras = self._forward.cache, self._forward.loras

    def run_chunks(self, chunks: Sequence[TokenChunk], every: bool = False) -> torch.Tensor:
        """Compute chunks of tokens and cache them; see `ModelRunner`."""
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        ends = lengths.cumsum(0)
        tokens = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        slots = torch.tensor([chunk.slot for chunk in chunks]).repeat_interleave(lengths)
        # The difference between a token's position and its index in the pass, for each chunk.
        offsets = torch.tensor([chunk.start for chunk in chunks]) - (ends - lengths)
        positions = torch.arange(len(tokens)) + offsets.repeat_interleave(lengths)
        hidden = self._run(tokens, slots, positions)
        return hidden if every else hidden[ends - 1]

    def decode(self, slots: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """Run a decode step of one token per sequence; return hidden states, [batch, hidden]. span is unused."""
        return self._run(tokens, slots, positions)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocabulary] of hidden states [n, hidden]."""
        return self._forward.logits(hidden)

    def normalize(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return hidden states [n, hidden] after the final norm; see `ModelRunner`."""
        return final_norm(hidden, self._norm, self._epsilon)

    def take_term_counts(self) -> TermCounts:
        """Return the counts of the linear layers since the last call."""
        return self._forward.take_term_counts()

    def warm_up(self) -> None:
        """Do nothing: the kernels are compiled before the model loads."""

    def _run(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        embedded = self._embedding.look_up(tokens)
        if self._scale != 1:
            embedded *= self._scale
        return self._forward.forward(embedded, slots, positions)
