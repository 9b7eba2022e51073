"""The interface of the formats of linear layers, `LinearFormat`, and what several of them share: packing and scales."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from llama_engine.checkpoint.tensor_names import SavedLinear
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes of unquantized tensors, by safetensors' names and GGUF's."""


class Expected(NamedTuple):
    """The required shape and dtype of a saved tensor. dtypes: safetensors' names of those that are allowed."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


class Groups(NamedTuple):
    """The groups of a layer, as the fields of `LinearWeight`. size: columns of a group."""

    bits: int
    size: int
    has_offsets: bool
    has_order: bool = False


class LinearFormat(Protocol):
    """Reads the linear layers that one checkpoint saves in a format."""

    def has(self, linear: SavedLinear) -> bool:
        """Return whether the layer is saved in this format; else it is saved in floats."""

    def tensors(self, linear: SavedLinear) -> Mapping[str, Expected]:
        """Return the tensors of a layer by name, besides its bias. Raises CheckpointError if it can't be served."""

    def groups(self, linear: SavedLinear) -> Groups | None:
        """Return the groups of the layer that `read` returns; None is INT8 per channel.

        The headers decide: contents may turn out to need no offsets and no order, or to have another order than the
        layers that it is fused with, and then all of these become INT8 per channel.
        """
        return None

    def read(self, linear: SavedLinear) -> LinearWeight:
        """Return a layer without its bias, on the CPU. Raises CheckpointError for invalid contents."""


BITS = (4, 8)
"""Numbers of bits that `unpack` reads."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers of int32 words [rows, words] less 2^(bits - 1), int8, [rows, words · 32 / bits]."""
    # Copy, because contiguous() keeps other strides of a dimension of size 1.
    octets = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        return octets.bitwise_xor(128).view(torch.int8)
    # Put each byte's two integers into two bytes, the lower ones first.
    pairs = octets.to(torch.int16)
    pairs |= pairs << 4
    pairs &= 0x0F0F
    return pairs.view(torch.int8).sub_(8)


def packed_length(count: int, bits: int) -> int:
    """Return the number of words of `count` integers."""
    return -(-count * bits // 32)


MAX_SCALE = 1e35
"""Largest magnitude of a scale. Its products with 8-bit integers or floats are finite. Scales may be negative or 0."""

_ACTIVATION_SCALES = (
    "input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale", "output_zero_point"
)  # fmt: skip

_log = logging.getLogger(__name__)


def read_scales(saved: SavedTensors, name: str) -> torch.Tensor:
    """Return saved scales in float32, refusing those with which a layer has no finite weights.

    Raises CheckpointError for one that is NaN, infinite or too large.
    """
    scales = saved.read(name).float()
    # NaN compares false.
    if not (scales.abs() <= MAX_SCALE).all():
        raise CheckpointError(f"{saved.source} has a scale in {name} that is NaN or larger than {MAX_SCALE:.0e}")
    return scales


def log_activation_scales(saved: SavedTensors) -> None:
    """Log one line if the checkpoint has scales of activations."""
    if names := sorted(name for name in saved if name.rpartition(".")[2] in _ACTIVATION_SCALES):
        _log.warning("%d saved scales of activations are ignored, first %s", len(names), names[0])


def activation_scales(saved: SavedTensors, linear: str) -> Mapping[str, Expected]:
    """Return a layer's scales of activations by name, as they are saved."""
    names = (f"{linear}.{name}" for name in _ACTIVATION_SCALES)
    return {name: Expected(saved[name].shape, (saved[name].dtype,)) for name in names if name in saved}
