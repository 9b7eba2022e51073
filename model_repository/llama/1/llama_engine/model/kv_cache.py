"""The KV cache of a runner, and of the PyTorch forward: keys and values of every slot, allocated once.

A sequence keeps its slot until it ends; a forward pass names the slot and the position of each of its tokens, so
nothing is moved when sequences come and go.

Positions beyond a sequence's length hold stale values, NaN perhaps, and a masked score times a stale NaN is NaN:
`gather` returns zeros in their place, and a block of a prompt has them cleared (`clear`) before it is read.

In INT8 each position and head has a scale, for keys and for values: x ≈ scale · q with |q| ≤ 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 16
"""Positions per slot are a multiple of this: the compiled kernels read whole blocks."""

_SCALE = torch.float32


@dataclass(frozen=True)
class KVCacheShape:
    """Dimensions of the KV cache. spare: positions per slot, 0 or 1, that only padding is written to."""

    layers: int
    slots: int
    key_value_heads: int
    max_model_len: int
    head_dim: int
    dtype: torch.dtype
    spare: int = 0

    @property
    def positions(self) -> int:
        """Positions per slot, in whole blocks."""
        return -(-(self.max_model_len + self.spare) // BLOCK) * BLOCK

    @property
    def bytes_per_token(self) -> int:
        """Bytes per position and slot: keys and values of all layers, and their scales."""
        scale = _SCALE.itemsize if self.dtype == torch.int8 else 0
        return 2 * self.layers * self.key_value_heads * (self.head_dim * self.dtype.itemsize + scale)

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.slots * self.positions * self.bytes_per_token


def gathered_bytes(shape: KVCacheShape, dtype: torch.dtype) -> int:
    """Return the bytes that `KVCache.gather` of all slots holds at its peak, in this dtype."""
    copies = 2 * shape.slots * shape.positions * shape.key_value_heads * shape.head_dim * dtype.itemsize
    # A product with the scales is a copy of keys or values more.
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
        """Store the keys and values [n, KV heads, head dim] of tokens at positions [n] of slots [n]."""
        # The two indices are separated by a slice, so the indexed part is [n, heads, head dim].
        if self._quantized:
            keys, self.key_scales[layer][slots, :, positions] = _quantize(keys)
            values, self.value_scales[layer][slots, :, positions] = _quantize(values)
        self.keys[layer][slots, :, positions] = keys.to(self.shape.dtype)
        self.values[layer][slots, :, positions] = values.to(self.shape.dtype)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a slot's first positions to another slot, in every layer."""
        for tensor in self._tensors:
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def clear(self, layer: int, slot: int, first: int, end: int) -> None:
        """Set a layer's positions of a slot from `first` to before `end` to zeros."""
        for tensor in self._tensors:
            tensor[layer, slot, :, first:end] = 0

    def read(
        self, layer: int, slots: int | torch.Tensor, length: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of the first positions of a slot, [KV heads, length, head dim].

        They are views where dtypes agree. Of slots [rows]: copies [rows, KV heads, length, head dim].
        """
        keys, values = self.keys[layer, slots, :, :length].to(dtype), self.values[layer, slots, :, :length].to(dtype)
        if self._quantized:
            keys = keys * self.key_scales[layer, slots, :, :length, None].to(dtype)
            values = values * self.value_scales[layer, slots, :, :length, None].to(dtype)
        return keys, values

    def gather(
        self, layer: int, slots: torch.Tensor, held: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies [rows, KV heads, span, head dim] of the first positions of slots [rows].

        held: [rows, span], which positions the row's sequence has; others are zeros.
        """
        keys, values = self.read(layer, slots, held.shape[1], dtype)
        stale = ~held[:, None, :, None]
        return keys.masked_fill_(stale, 0), values.masked_fill_(stale, 0)


def _quantize(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q [n, heads, dim] and scales [n, heads]. The scale of a non-finite vector is not finite either."""
    largest = states.float().abs().amax(-1)
    scales = largest / 127
    inverse = torch.where(largest > 0, 127 / largest, 0.0)
    return (states.float() * inverse[..., None]).round(), scales
