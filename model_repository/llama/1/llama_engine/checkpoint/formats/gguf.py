"""GGUF's blocks: integers of 4 or 8 bits in groups of 32 columns."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from llama_engine.checkpoint.formats.linear_format import Expected, Groups
from llama_engine.checkpoint.gguf.blocks import grouped, groups_of
from llama_engine.checkpoint.gguf.tensors import GgufTensors
from llama_engine.checkpoint.per_channel import for_each_block, row_blocks
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError


class GgufBlocks:
    """Reads the quantized layers of a GGUF file, without rounding for the types that `gguf.blocks` unpacks."""

    def __init__(self, saved: SavedTensors) -> None:
        """Raise CheckpointError if the tensors aren't those of a GGUF file."""
        if not isinstance(saved, GgufTensors):
            raise CheckpointError(f"{saved.source} is quantized with 'gguf' and has no GGUF file")
        self._saved = saved

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer's weight is quantized."""
        return self._saved.block_type(f"{linear.name}.weight") is not None

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return the weight. It has no other tensors."""
        return {f"{linear.name}.weight": Expected(linear.shape, ("F32",))}

    def groups(self, linear: SavedLinear) -> Groups | None:
        """Return the groups of a layer."""
        kind = self._saved.block_type(f"{linear.name}.weight")
        assert kind is not None, "has() is true"
        return groups_of(kind)

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias. Raises CheckpointError for scales that aren't finite."""
        name, (rows, columns) = f"{linear.name}.weight", linear.shape
        kind = self._saved.block_type(name)
        assert kind is not None, "has() is true"
        weight = torch.empty(rows, columns, dtype=torch.int8)
        groups = groups_of(kind)
        scales = torch.empty(rows, columns // groups.size)
        offsets = torch.empty_like(scales) if groups.has_offsets else None

        def convert(part: slice) -> None:
            read = grouped(self._saved.blocks(name, part), kind)
            assert read.scales is not None
            weight[part], scales[part] = read.weight, read.scales
            if offsets is not None:
                assert read.offsets is not None
                offsets[part] = read.offsets

        for_each_block(row_blocks(rows, columns), convert)
        if not scales.isfinite().all() or (offsets is not None and not offsets.isfinite().all()):
            raise CheckpointError(f"{self._saved.source}: {name} has scales that aren't finite")
        return LinearWeight(weight, scales, None, offsets, groups.bits)
