"""The KV cache: its shape, and the cache of the PyTorch runner, with the keys and values of every slot, allocated once.

A sequence keeps its slot until it ends, and a forward pass names the slot and the position of each of its tokens. So
nothing is moved when sequences are added or removed.

Positions beyond a sequence's length have stale values, possibly NaN, which would pass through a mask (0 · NaN is NaN).
So `gather` returns zeros for them, and `clear` zeroes them before attention reads a whole block.

In INT8, each key and each value has a scale per position and head: x ≈ scale · q with |q| ≤ 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16
"""Granularity of the positions per slot, because the compiled kernels read whole blocks."""

_SCALE = torch.float32


@dataclass(frozen=True)
class KVCacheShape:
    """Dimensions of a KV cache. spare: additional positions per slot, 0 or 1, for writes of padding rows."""

    layers: int
    slots: int
    key_value_heads: int
    max_model_len: int
    head_dim: int
    dtype: torch.dtype
    spare: int = 0

    @property
    def positions(self) -> int:
        """Number of positions per slot, a multiple of BLOCK."""
        return -(-(self.max_model_len + self.spare) // BLOCK) * BLOCK

    @property
    def bytes_per_token(self) -> int:
        """Bytes per position of a slot: keys and values of all layers, and their scales."""
        scale = _SCALE.itemsize if self.dtype == torch.int8 else 0
        return 2 * self.layers * self.key_value_heads * (self.head_dim * self.dtype.itemsize + scale)

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.slots * self.positions * self.bytes_per_token


def gathered_bytes(shape: KVCacheShape, dtype: torch.dtype) -> int:
    """Return the peak bytes of `KVCache.gather` for all slots. dtype: of the returned copies."""
    copies = 2 * shape.slots * shape.positions * shape.key_value_heads * shape.head_dim * dtype.itemsize
    # Multiplying by the scales needs one more copy of keys or values.
    return copies if shape.dtype == dtype else copies * 3 // 2


class KVCache:
    """Keys and values per layer, [slots, KV heads, positions, head dim]. Not thread-safe."""

    def __init__(self, shape: KVCacheShape, device: torch.device) -> None:
        self.shape = shape
        size = (shape.layers, shape.slots, shape.key_value_heads, shape.positions)
        self.keys = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._quantized = shape.dtype == torch.int8
        scales = size if self._quantized else (shape.layers, 0)
        self.key_scales = torch.zeros(scales, dtype=_SCALE, device=device)
        self.value_scales = torch.zeros_like(self.key_scales)
        self._tensors = [self.keys, self.values]
        if self._quantized:
            self._tensors += [self.key_scales, self.value_scales]

    def write(
        self, layer: int, slots: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store the keys and values [n, KV heads, head dim] of n tokens at positions [n] of slots [n]."""
        # Two index tensors separated by a slice: the result's shape is [n, heads, head dim].
        if self._quantized:
            keys, self.key_scales[layer][slots, :, positions] = _quantize(keys)
            values, self.value_scales[layer][slots, :, positions] = _quantize(values)
        self.keys[layer][slots, :, positions] = keys.to(self.shape.dtype)
        self.values[layer][slots, :, positions] = values.to(self.shape.dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`, in every layer."""
        for tensor in self._tensors:
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def clear(self, layer: int, slot: int, first: int, end: int) -> None:
        """Set the positions [first, end) of a slot to zeros, in one layer."""
        for tensor in self._tensors:
            tensor[layer, slot, :, first:end] = 0

    def read(
        self, layer: int, slots: int | torch.Tensor, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of the first `length` positions of a slot, [KV heads, length, head dim] each.

        They are views if dtype is the cache's. For several slots [rows]: copies [rows, KV heads, length, head dim].
        """
        keys, values = self.keys[layer, slots, :, :length].to(dtype), self.values[layer, slots, :, :length].to(dtype)
        if self._quantized:
            keys = keys * self.key_scales[layer, slots, :, :length, None].to(dtype)
            values = values * self.value_scales[layer, slots, :, :length, None].to(dtype)
        return keys, values

    def gather(
        self, layer: int, slots: torch.Tensor, held: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of keys and values of the first `span` positions, [rows, KV heads, span, head dim] each.

        slots: [rows]. held: [rows, span], bool, the positions that the row's sequence has; others are zeros.
        """
        keys, values = self.read(layer, slots, held.shape[1], dtype)
        stale = ~held[:, None, :, None]
        return keys.masked_fill_(stale, 0), values.masked_fill_(stale, 0)


def _quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize to the range of INT8: return q [n, heads, dim], whole numbers in float32, and scales [n, heads].

    A vector that isn't finite has a scale that isn't.
    """
    largest = states.float().abs().amax(-1)
    scales = largest / 127
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    return (states.float() * inverse[..., None]).round(), scales
