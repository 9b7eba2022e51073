"""bitsandbytes' layers in NF4: 4 bits with a scale for each block of weights. transformers' modules read it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod

from llama_engine.bounds import show
from llama_engine.checkpoint.formats.linear_format import Expected, LinearFormat
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError, one_line

_BLOCKS = tuple(1 << power for power in range(5, 13))
"""Numbers of weights that can share a scale."""

_STATE = ".quant_state.bitsandbytes__nf4"
"""Suffix of a layer's description, in JSON."""

_NESTED_BLOCK = 256
"""Scales that share a scale of their own, where they are quantized (`bnb_4bit_use_double_quant`)."""


class BitsandbytesNf4(LinearFormat):
    """Describes NF4 layers."""

    def __init__(self, saved: SavedTensors) -> None:
        self._saved = saved

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer's weight is saved in 4 bits."""
        return f"{linear.name}.weight.absmax" in self._saved

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return weight, scales, and the tables and the description of the quantization."""
        name, weights = f"{linear.name}.weight", prod(linear.shape)
        state = f"{name}{_STATE}"
        scales = self._saved[f"{name}.absmax"].shape
        if scales not in [(-(-weights // block),) for block in _BLOCKS]:
            raise CheckpointError(f"{self._saved.source} has {name}.absmax in shape {scales}, which fits no block size")
        tensors = {
            name: Expected((-(-weights // 2), 1), ("U8",)),
            f"{name}.absmax": Expected(scales, ("F32", "U8")),
            f"{name}.quant_map": Expected((16,), ("F32",)),
            state: Expected(self._saved[state].shape if state in self._saved else (), ("U8",)),
        }
        if self._saved[f"{name}.absmax"].dtype == "U8":
            tensors[f"{name}.nested_absmax"] = Expected((-(-scales[0] // _NESTED_BLOCK),), ("F32",))
            tensors[f"{name}.nested_quant_map"] = Expected((256,), ("F32",))
        return tensors

    def check_description(self, linear: SavedLinear) -> None:
        """Raise CheckpointError unless the description of a layer fits its tensors, as bitsandbytes' kernels assume."""
        name = f"{linear.name}.weight"
        scales = self._saved[f"{name}.absmax"].shape[0]
        try:
            fields = json.loads(bytes(self._saved.read(f"{name}{_STATE}").tolist()))
            blocks = [(prod(linear.shape), fields["blocksize"], scales)]
            if f"{name}.nested_absmax" in self._saved:
                blocks.append((scales, fields["nested_blocksize"], -(-scales // _NESTED_BLOCK)))
            fits = fields["quant_type"] == "nf4" and fields["shape"] == [*linear.shape]
            fits = fits and all(block > 0 and -(-weights // block) == count for weights, block, count in blocks)
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{self._saved.source} has {name}{_STATE}: {one_line(error)}") from error
        if not fits:
            raise CheckpointError(
                f"{self._saved.source} has {name}{_STATE} {show(fields)}, not that of {linear.shape} weights with "
                f"{scales} scales"
            )

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Always raises CheckpointError: only transformers loads NF4."""
        raise CheckpointError(f"{self._saved.source} has {linear.name} in NF4")
