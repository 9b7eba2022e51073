"""AWQ's layers: 4-bit integers in groups, packed along the outputs in the order of the `gemm` kernels.

Source: `modules/linear/gemm.py` and `utils/packing_utils.py` of AutoAWQ 0.2.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from llama_engine.checkpoint.formats.grouped_integers import (
    GroupedIntegers,
    GroupedLinears,
    consecutive_groups,
    group_count,
    read_group_size,
    served_groups,
)
from llama_engine.checkpoint.formats.linear_format import FLOATS, Expected, Groups, packed_length, read_scales, unpack
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError

_BITS = 4
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place within a word, from the lowest bits, of each of its eight outputs."""


class Awq:
    """Reads AWQ's layers."""

    def __init__(self, saved: SavedTensors, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for another number of bits than 4 and for another layout than `gemm`'s."""
        self._saved, self._linears = saved, GroupedLinears(saved)
        bits = config.get("bits", config.get("w_bit"))
        if bits != _BITS:
            raise CheckpointError(f"{saved.source}: bits is {bits!r}; this engine reads AWQ's {_BITS}")
        layout = config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm"
        layout = "llm-awq" if config.get("backend") == "llm-awq" else str(layout).lower()
        if layout != "gemm":
            raise CheckpointError(f"{saved.source}: version is {layout!r}; this engine reads AWQ's gemm")
        self._size = read_group_size(saved, config, "q_group_size" if "q_group_size" in config else "group_size")
        self._has_zeros = bool(config.get("zero_point", True))

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer's weight is saved as packed integers."""
        return f"{linear.name}.qweight" in self._saved

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return packed integers, scales, and packed zero points, which symmetric checkpoints may lack."""
        outputs, inputs = linear.shape
        groups, words = group_count(inputs, self._size), packed_length(outputs, _BITS)
        tensors = {
            f"{linear.name}.qweight": Expected((inputs, words), ("I32",)),
            f"{linear.name}.scales": Expected((groups, outputs), FLOATS),
        }
        name = f"{linear.name}.qzeros"
        saves_zeros = self._has_zeros or name in self._saved
        return {**tensors, name: Expected((groups, words), ("I32",))} if saves_zeros else tensors

    def groups(self, linear: SavedLinear) -> Groups | None:
        """Return the groups of a layer; None is INT8 per channel."""
        return served_groups(linear.shape[1], Groups(_BITS, self._size, f"{linear.name}.qzeros" in self._saved))

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias."""
        name, words = f"{linear.name}.qzeros", self._saved.read(f"{linear.name}.qweight")
        outputs_per_word = len(_PLACES)

        def read(rows: slice) -> torch.Tensor:
            first, last = rows.start // outputs_per_word, -(-rows.stop // outputs_per_word)
            integers = _unpack_outputs(words[:, first:last])
            return integers[rows.start - first * outputs_per_word :][: rows.stop - rows.start]

        return self._linears.linear(
            GroupedIntegers(
                read=read,
                scales=read_scales(self._saved, f"{linear.name}.scales").t().contiguous(),
                zeros=_unpack_outputs(self._saved.read(name))[: linear.shape[0]] if name in self._saved else None,
                groups=consecutive_groups(linear.shape[1], self._size),
                bits=_BITS,
                name=linear.name,
            )
        )


def _unpack_outputs(words: torch.Tensor) -> torch.Tensor:
    """Return the integers of words [columns, outputs / 8], less 8, as [outputs, columns]."""
    integers = unpack(words.t(), _BITS).view(words.shape[1], words.shape[0], len(_PLACES))
    return torch.stack([integers[:, :, place] for place in _PLACES], 1).view(-1, words.shape[0])
