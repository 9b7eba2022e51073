"""GPTQ's layers: integers packed along the inputs, in groups that may follow the order of the activations.

Source: `nn_modules/qlinear/torch.py` and `utils/model.py` of GPTQModel 7.7, `nn_modules/qlinear/qlinear_cuda.py` of
auto-gptq 0.7.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llama_engine.checkpoint.formats.grouped_integers import (
    GroupedIntegers,
    GroupedLinears,
    consecutive_groups,
    group_count,
    read_group_size,
    read_groups,
    served_groups,
)
from llama_engine.checkpoint.formats.linear_format import (
    BITS,
    FLOATS,
    Expected,
    Groups,
    packed_length,
    read_scales,
    unpack,
)
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError

_ONES = {"gptq": {4: 0x11111111, 8: 0x01010101}, "gptq_v2": {4: 0, 8: 0}}
"""Added to each word of zero points, by the layout and the bits: the older layout saves each zero point less 1."""


class Gptq:
    """Reads GPTQ's layers. Zero points are used as saved, in symmetric checkpoints too."""

    def __init__(self, saved: SavedTensors, config: Mapping[str, Any]) -> None:
        """Raises CheckpointError for another layout, and for other numbers of bits than 4 and 8."""
        self._saved, self._linears = saved, GroupedLinears(saved)
        layout, bits = config.get("checkpoint_format") or config.get("format") or "gptq", config.get("bits")
        if layout not in _ONES:
            known = ", ".join(_ONES)
            raise CheckpointError(f"{saved.source}: checkpoint_format is {layout!r}; this engine reads {known}")
        if bits not in BITS:
            raise CheckpointError(f"{saved.source}: bits is {bits!r}; this engine reads GPTQ's 4 and 8")
        self._ones, self._bits, self._size = _ONES[layout], int(bits), read_group_size(saved, config)
        self._overridden = bool(config.get("dynamic"))
        self._symmetric, self._ordered = bool(config.get("sym")), bool(config.get("desc_act"))

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer's weight is saved as packed integers."""
        return f"{linear.name}.qweight" in self._saved

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return packed integers and zero points, scales, and the group of each input where it is saved."""
        (outputs, inputs), (bits, size) = linear.shape, self._layout(linear)
        groups = group_count(inputs, size)
        tensors = {
            f"{linear.name}.qweight": Expected((packed_length(inputs, bits), outputs), ("I32",)),
            f"{linear.name}.qzeros": Expected((groups, packed_length(outputs, bits)), ("I32",)),
            f"{linear.name}.scales": Expected((groups, outputs), FLOATS),
        }
        name = f"{linear.name}.g_idx"
        return {**tensors, name: Expected((inputs,), ("I32", "I64"))} if name in self._saved else tensors

    def groups(self, linear: SavedLinear) -> Groups | None:
        """Return the groups of a layer; None is INT8 per channel."""
        bits, size = self._layout(linear)
        return served_groups(linear.shape[1], Groups(bits, size, not self._symmetric, self._ordered))

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias."""
        (outputs, inputs), (bits, size) = linear.shape, self._layout(linear)
        words = self._saved.read(f"{linear.name}.qweight")
        # Add 1 to whole words, with carry, as GPTQModel subtracts it: a zero point of 0 borrows from the next one.
        zeros = unpack(self._saved.read(f"{linear.name}.qzeros") + self._ones[bits], bits)
        name = f"{linear.name}.g_idx"
        if name in self._saved:
            groups = read_groups(self._saved, name, group_count(inputs, size))
        else:
            groups = consecutive_groups(inputs, size)
        return self._linears.linear(
            GroupedIntegers(
                read=lambda rows: unpack(words[:, rows].t(), bits)[:, :inputs],
                scales=read_scales(self._saved, f"{linear.name}.scales").t().contiguous(),
                zeros=zeros[:, :outputs].t().contiguous(),
                groups=groups,
                bits=bits,
                name=linear.name,
            )
        )

    def _layout(self, linear: SavedLinear) -> tuple[int, int]:
        """Return bits and group size of a layer. With overrides (`dynamic`) they are those of its tensors' shapes."""
        words, scales = (self._saved.get(f"{linear.name}.{name}") for name in ("qweight", "scales"))
        if not self._overridden or words is None or scales is None:
            return self._bits, self._size
        inputs, groups = linear.shape[1], max(1, scales.shape[0])
        bits = next((bits for bits in BITS if words.shape[0] == packed_length(inputs, bits)), self._bits)
        return bits, self._size if inputs % groups else inputs // groups
