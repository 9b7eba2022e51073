"""The interface of the formats of linear layers: `LinearFormat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.weights import LinearWeight

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of unquantized tensors, by safetensors' names and GGUF's."""


class Expected(NamedTuple):
    """What a saved tensor must be. shape: its dimensions. dtypes: safetensors' names, one of which it has."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Groups(NamedTuple):
    """The groups of a layer, as the fields of `LinearWeight`. size: columns of a group."""

    bits: int
    size: int
    has_offsets: bool
    has_order: bool = False


class LinearFormat(Protocol):
    """Reads the linear layers that one checkpoint saves in a format.

    name: of the format, for messages and the log.
    """

    name: str

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer is saved in this format; else it is saved in floats."""

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return the tensors of a layer by name, besides its bias. Raises CheckpointError if it can't be served."""

    def groups(self, linear: SavedLinear) -> Groups | None:
        """Return the groups of the layer that `read` returns; None is rows.

        By the headers: contents may turn out to need no offsets and no order, or to have another order than the layers
        that it is fused with, which makes rows of all.
        """

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias, on the CPU. Raises CheckpointError for invalid contents."""
