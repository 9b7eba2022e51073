"""bitsandbytes' LLM.int8(): INT8 `weight` and the largest magnitude of each output channel, `SCB`."""

from __future__ import annotations

from collections.abc import Mapping

from llama_engine.checkpoint.formats.linear_format import FLOATS, Expected, LinearFormat, read_scales
from llama_engine.checkpoint.per_channel import MAX_WEIGHT
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError

_ROW_FORMAT = 0
"""bitsandbytes' number for the row layout, its only layout of INT8 weights since 2024."""


class BitsandbytesInt8(LinearFormat):
    """Reads bitsandbytes' INT8 layers."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer's weight is saved as integers."""
        saved = self._saved.get(f"{linear.name}.weight")
        return saved is not None and saved.dtype == "I8"

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return weight, scales and the number of the layout. Raises CheckpointError for another layout."""
        tensors = {
            f"{linear.name}.weight": Expected(linear.shape, ("I8",)),
            f"{linear.name}.SCB": Expected(linear.shape[:1], FLOATS),
        }
        layout = f"{linear.name}.weight_format"
        if layout in self._saved:
            if (shape := self._saved[layout].shape) not in ((), (1,)):
                raise CheckpointError(f"{self._saved.source} has {layout} in shape {shape}, not one number")
            if (number := self._saved.read(layout).item()) != _ROW_FORMAT:
                raise CheckpointError(f"{self._saved.source} has {layout} {number}, not {_ROW_FORMAT}: rows")
            tensors[layout] = Expected(shape, (self._saved[layout].dtype,))
        return tensors

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias. Raises CheckpointError for scales that are NaN."""
        scales = read_scales(self._saved, f"{linear.name}.SCB") / MAX_WEIGHT
        return LinearWeight(self._saved.read(f"{linear.name}.weight"), scales)
