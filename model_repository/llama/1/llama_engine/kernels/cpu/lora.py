"""Packs LoRA adapters for the CPU kernels: see lora.h for the layout."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.lora import LoraAdapter
from llama_engine.checkpoint.tensor_names import layer_linears
from llama_engine.kernels.activation_terms import DECODER_LINEARS
from llama_engine.kernels.cpu.bindings import Lora
from llama_engine.kernels.cpu.packing import OUTPUTS, linear_sources, output_scale, padded
from llama_engine.kernels.lora_layout import LoraLimits, LoraPart, lora_parts

RANKS = 16
"""Ranks of a block."""


def shrunk_stride(architecture: Architecture, limits: LoraLimits) -> int:
    """Return the floats of a token's shrunk activations, x · Aᵀ of fused layers side by side."""
    return padded(max(map(len, layer_linears(architecture).values())) * limits.rank, RANKS)


def packed_lora_bytes(architecture: Architecture, limits: LoraLimits) -> int:
    """Return the bytes of `limits.count` packed adapters of the largest rank on all linear layers, in float32."""
    floats, parts = 0, layer_linears(architecture)
    for name, (source, inputs) in linear_sources(architecture).items():
        floats += padded(len(parts[name]) * limits.rank, RANKS) * len(inputs) + limits.rank * len(source)
    return limits.count * architecture.layers * 4 * floats


class PackedLora:
    """A packed linear layer of an adapter. structure: the C structure, valid as long as this object exists."""

    def __init__(self, parts: Sequence[LoraPart], source: torch.Tensor, inputs: torch.Tensor, scale: float) -> None:
        """Pack the parts of a fused layer.

        source: [outputs] int64, the layer's channel for each packed output; -1 is an output of zeros. A block of
        outputs has channels of one part only. inputs: [padded] int64, the same for its inputs. scale: factor of the
        outputs.
        """
        dtype = torch.bfloat16 if all(part.weights.a.dtype == torch.bfloat16 for part in parts) else torch.float32
        a = torch.cat([part.weights.a.T.to(dtype) for part in parts], dim=1)
        padding = padded(a.shape[1], RANKS) - a.shape[1]
        a = _rows_or_zeros(functional.pad(a, (0, padding)), inputs).view(len(inputs), -1, RANKS)
        scaling = torch.cat([torch.full((len(part.weights.a),), scale * part.weights.scaling) for part in parts])
        channels = source.view(-1, OUTPUTS)
        last = channels.amax(1)
        # Each row is the C structure of a block: two int32 in the first column, an int64 in the second.
        ranges, b, size = torch.zeros(len(channels), 2, dtype=torch.int64), [], 0
        for part in parts:
            (outputs, rank), first = part.weights.b.shape, part.first_output
            blocks = ((last >= first) & (last < first + outputs)).nonzero()[:, 0]
            rows = torch.where(channels[blocks] < 0, -1, channels[blocks] - first).flatten()
            values = _rows_or_zeros(part.weights.b.to(dtype), rows).view(-1, OUTPUTS, rank)
            b.append(values.transpose(1, 2).flatten())
            ranges.view(torch.int32)[blocks, :2] = torch.tensor([part.first_rank, rank], dtype=torch.int32)
            ranges[blocks, 1] = size + torch.arange(len(blocks)) * rank * OUTPUTS
            size += b[-1].numel()
        self._tensors = (
            a.transpose(0, 1).contiguous(),
            torch.cat(b),
            functional.pad(scaling, (0, padding)),
            ranges,
        )
        pointers = (tensor.data_ptr() for tensor in self._tensors)
        self.structure = Lora(*pointers, a.shape[1], dtype == torch.bfloat16)


class LoraTable:
    """The adapters of a `CpuForward`: their packed weights, and the one of each slot's sequence.

    table: the kernels' structures by adapter, decoder layer and linear layer; None without room for adapters. adapters:
    [slots] int32; 0 is none. shrunk: [room][stride], scratch memory.
    """

    def __init__(self, architecture: Architecture, slots: int, room: int, limits: LoraLimits) -> None:
        self._architecture, self._limits = architecture, limits
        self._size = architecture.layers * len(DECODER_LINEARS)
        self.table = (Lora * ((limits.count + 1) * self._size))() if limits.count else None
        self.adapters = torch.zeros(slots, dtype=torch.int32)
        self.shrunk = torch.zeros(room if limits.count else 0, shrunk_stride(architecture, limits))
        self._loaded: dict[int, list[PackedLora | None]] = {}

    def load(self, index: int, adapter: LoraAdapter | None) -> None:
        """Set the weights of an adapter, from 1 to `limits.count`; None frees them. No slot may have it.

        Any thread may call it. Raises IndexError for another index.
        """
        if self.table is None or not 1 <= index <= self._limits.count:
            raise IndexError(f"adapter {index} is outside the room for {self._limits.count}")
        packed: list[PackedLora | None] = [None] * self._size
        if adapter is not None:
            packed = pack_adapter(self._architecture, adapter)
        for place, lora in enumerate(packed, index * self._size):
            self.table[place] = Lora() if lora is None else lora.structure
        if adapter is None:
            self._loaded.pop(index, None)
        else:
            self._loaded[index] = packed

    def set(self, slot: int, index: int) -> None:
        """Set the adapter of a slot's sequence; 0 is none. Raises IndexError for an adapter that isn't loaded."""
        if index and index not in self._loaded:
            raise IndexError(f"adapter {index} is not loaded")
        self.adapters[slot] = index

    def order(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return the order of tokens, by their slots, in which those of an adapter are adjacent; None if they are.

        The kernels read an adapter's weights once for several adjacent tokens.
        """
        if not self._loaded:
            return None
        adapters = self.adapters[slots]
        return adapters.argsort(stable=True) if bool((adapters[1:] < adapters[:-1]).any()) else None


def pack_adapter(architecture: Architecture, adapter: LoraAdapter) -> list[PackedLora | None]:
    """Return an adapter's packed linear layers by decoder layer and DECODER_LINEARS; None where it has none."""
    sources = linear_sources(architecture)
    scale = {"attention_output": output_scale(architecture), "down": output_scale(architecture)}
    return [
        PackedLora(parts[field], *sources[field], scale.get(field, 1.0)) if parts[field] else None
        for parts in (lora_parts(architecture, layer) for layer in adapter.layers)
        for field in DECODER_LINEARS
    ]


def _rows_or_zeros(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return these rows; -1 is a row of zeros."""
    return functional.pad(rows, (0, 0, 0, 1)).index_select(0, torch.where(index < 0, len(rows), index))
