"""FP8 layers (E4M3) with one scale per tensor, channel or block; requantized to INT8 per channel, which rounds once
more.

Source: transformers 5.23, `integrations/finegrained_fp8.py` (quant_method fp8: blocks, as of DeepSeek-V3 and Qwen3, or
tensors, `weight_scale_inv`) and `integrations/fbgemm_fp8.py` (fbgemm_fp8: channels, `weight_scale`); vLLM,
`quantization/fp8.py` (fp8 of AutoFP8: tensors, `weight_scale`). W = scale · weight, whatever the scale's name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from llama_engine.checkpoint.formats.linear_format import (
    FLOATS,
    Expected,
    LinearFormat,
    activation_scales,
    log_activation_scales,
    read_scales,
)
from llama_engine.checkpoint.per_channel import for_each_block, quantize_per_channel, row_blocks
from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError

_DTYPE = "F8_E4M3"

Block = tuple[int, int]
"""Rows and columns that have one scale."""


def read_block(saved: SavedTensors, key: str, value: object) -> Block:
    """Return the block size in a config's field. Raises CheckpointError if it isn't two positive integers."""
    match value:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise CheckpointError(f"{saved.source}: {key} is {value!r}, not the rows and columns of a block")


class Fp8(LinearFormat):
    """Reads FP8 layers."""

    def __init__(self, saved: SavedTensors, blocks: Sequence[Block]) -> None:
        """Take the block sizes that there may be besides channels and whole tensors."""
        self._saved, self._blocks = saved, blocks

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer's weight is saved in FP8."""
        saved = self._saved.get(f"{linear.name}.weight")
        return saved is not None and saved.dtype == _DTYPE

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return weight and scales. Raises CheckpointError if the scales' shape fits no block size."""
        name = self._scales_name(linear)
        if name in self._saved:
            self._block(linear)
        shape = self._saved[name].shape if name in self._saved else ()
        return {
            f"{linear.name}.weight": Expected(linear.shape, (_DTYPE,)),
            name: Expected(shape, FLOATS),
            **activation_scales(self._saved, linear.name),
        }

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias, INT8 per channel. Raises CheckpointError for invalid contents."""
        height, width = self._block(linear)
        channels, columns = linear.shape
        name = f"{linear.name}.weight"
        scales = read_scales(self._saved, self._scales_name(linear)).view(-(-channels // height), -1)
        weight, channel_scales = torch.empty(linear.shape, dtype=torch.int8), torch.empty(channels)

        def quantize(rows: slice) -> None:
            floats = self._saved.read(name, rows).float()
            factors = scales[torch.arange(rows.start, rows.stop) // height].repeat_interleave(width, 1)[:, :columns]
            if not floats.isfinite().all():
                raise CheckpointError(f"{self._saved.source} has a weight in {name} that is NaN")
            if not factors.all() and floats[factors == 0].any():
                raise CheckpointError(
                    f"{self._saved.source} has a scale of 0 for weights of {linear.name} that aren't 0"
                )
            weight[rows], channel_scales[rows] = quantize_per_channel(floats * factors)

        for_each_block(row_blocks(*linear.shape), quantize)
        return LinearWeight(weight, channel_scales)

    def _scales_name(self, linear: SavedLinear) -> str:
        name = f"{linear.name}.weight_scale"
        return name if name in self._saved else f"{name}_inv"

    def _block(self, linear: SavedLinear) -> Block:
        """Return the block size of a layer by the shape of its scales."""
        name, (rows, columns) = self._scales_name(linear), linear.shape
        shape = self._saved[name].shape
        if prod(shape) == 1:
            return rows, columns
        if shape in ((rows,), (rows, 1)):
            return 1, columns
        for height, width in self._blocks:
            if shape == (-(-rows // height), -(-columns // width)):
                return height, width
        raise CheckpointError(f"{self._saved.source} has {name} in shape {shape}, not per tensor, channel or block")


def fp8(saved: SavedTensors, config: Mapping[str, Any]) -> Fp8:
    """Return the reader of a checkpoint of quant_method fp8 or fbgemm_fp8."""
    log_activation_scales(saved)
    block = config.get("weight_block_size")
    return Fp8(saved, [] if block is None else [read_block(saved, "weight_block_size", block)])
