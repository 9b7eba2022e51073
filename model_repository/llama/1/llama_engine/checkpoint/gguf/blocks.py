"""The blocks of GGUF's quantized types: as integers in groups of 32, and, by the package gguf, as floats.

Layouts: `block_q8_0`, `block_q4_0`, `block_q4_1` and `block_q4_K` in ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from llama_engine.checkpoint.formats.linear_format import Groups
from llama_engine.checkpoint.gguf.header import BlockType
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError

GROUP = 32
"""Columns of a group."""

_MAX_WEIGHT = 127
_MIDDLE = 8
"""Subtracted from unsigned 4-bit integers."""


def _q8_0(blocks: torch.Tensor) -> LinearWeight:
    """Float16 scale, 32 int8."""
    return LinearWeight(blocks[..., 2:].view(torch.int8), _halves(blocks[..., :2]))


def _q4_0(blocks: torch.Tensor) -> LinearWeight:
    """Float16 scale d, 32 integers u of 4 bits: d · (u - 8)."""
    return LinearWeight(_nibbles(blocks[..., 2:]), _halves(blocks[..., :2]), bits=4)


def _q4_1(blocks: torch.Tensor) -> LinearWeight:
    """Float16 scale d and minimum m, 32 integers u of 4 bits: d · u + m."""
    scales, minima = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    return LinearWeight(_nibbles(blocks[..., 4:]), scales, offsets=minima + _MIDDLE * scales, bits=4)


def _q4_k(blocks: torch.Tensor) -> LinearWeight:
    """Eight groups: float16 d and e; 6-bit integers s and m of each group; integers u of 4 bits: d · s · u - e · m."""
    d, e, packed = _halves(blocks[..., :2]), _halves(blocks[..., 2:4]), blocks[..., 4:16]
    low, middle, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    s = torch.cat([low & 63, high & 15 | low >> 6 << 4], dim=-1)
    m = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], dim=-1)
    scales = d * s
    # Two groups share 32 bytes.
    weights = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, GROUP))
    return LinearWeight(weights, scales, offsets=_MIDDLE * scales - e * m, bits=4)


_UNROUNDED_TYPES: Mapping[str, tuple[Callable[[torch.Tensor], LinearWeight], Groups]] = {
    "Q8_0": (_q8_0, Groups(8, GROUP, has_offsets=False)),
    "Q4_0": (_q4_0, Groups(4, GROUP, has_offsets=False)),
    "Q4_1": (_q4_1, Groups(4, GROUP, has_offsets=True)),
    "Q4_K": (_q4_k, Groups(4, GROUP, has_offsets=True)),
}
"""The types that aren't rounded: the function that unpacks their blocks, and the groups that it returns."""


def groups_of(kind: BlockType) -> Groups:
    """Return the groups that `grouped` returns for a type."""
    return _UNROUNDED_TYPES[kind.name][1] if kind.name in _UNROUNDED_TYPES else Groups(8, GROUP, has_offsets=False)


def grouped(data: torch.Tensor, kind: BlockType) -> LinearWeight:
    """Return rows as integers in groups of 32: as saved, or rounded if the type's integers aren't in such groups.

    data: uint8 [rows, bytes]. Raises CheckpointError for a type that isn't supported.
    """
    rows = len(data)
    if kind.name not in _UNROUNDED_TYPES:
        return _requantized(dequantized(data, kind))
    unpack, _ = _UNROUNDED_TYPES[kind.name]
    weight = unpack(data.view(rows, -1, kind.bytes))
    scales = weight.scales
    assert scales is not None
    offsets = None if weight.offsets is None else weight.offsets.reshape(rows, -1)
    return LinearWeight(weight.weight.reshape(rows, -1), scales.reshape(rows, -1), None, offsets, weight.bits)


def dequantized(data: torch.Tensor, kind: BlockType) -> torch.Tensor:
    """Return rows as float32. data: uint8 [rows, bytes]. Raises CheckpointError for a type that isn't supported."""
    # Imported here because only GGUF files need it.
    from gguf import GGMLQuantizationType, dequantize

    # Invalid scales become infinite or NaN, without a warning for each.
    with np.errstate(all="ignore"):
        try:
            return torch.from_numpy(dequantize(data.numpy(), GGMLQuantizationType[kind.name]))
        except NotImplementedError as error:
            raise CheckpointError(f"type {kind.name} isn't supported") from error


def check_type(kind: BlockType) -> None:
    """Raise CheckpointError if `dequantized` doesn't support a type."""
    dequantized(torch.zeros(1, kind.bytes, dtype=torch.uint8), kind)


def _requantized(values: torch.Tensor) -> LinearWeight:
    """Return floats as 8-bit groups without offsets; the largest magnitude of a group is 127."""
    groups = values.view(len(values), -1, GROUP)
    scales = groups.abs().amax(dim=2) / _MAX_WEIGHT
    # A group of zeros has scale 0.
    weights = (groups / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, :, None]).round_().to(torch.int8)
    return LinearWeight(weights.view(values.shape), scales)


def _halves(data: torch.Tensor) -> torch.Tensor:
    """Return float16 numbers [..., n] in bytes [..., 2n] as float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of bytes [..., n] and then the high ones, less 8, as int8 [..., 2n]."""
    return torch.cat([data & 15, data >> 4], dim=-1).to(torch.int8) - _MIDDLE
