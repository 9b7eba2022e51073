"""The slot cache: keys and values of every row, allocated once.

Per layer two tensors of [slots, key-value heads, max_model_len, head dim]. The rows in use are always the first ones,
so that what attention is given is a view and not a copy: a row that ends is replaced by the last one (`move`). A
forward pass covers neighbouring rows, each at its own positions; `aim` says which before the model calls `update`.

The cache knows nothing about requests, lengths or masks: what lies beyond a row's length is stale, and the mask of
the forward pass hides it. It is finite, though: a masked score times a stale NaN would still be NaN, hence zeros at
the start and `wipe` after a row that overflowed.

Where a pass has rows that are only padding, every slot has a spare position behind its last one: such a row has to
write somewhere, and the slot that it has the number of may be another row's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache


@dataclass
class _SlotLayer:
    """One layer's share; the flags are what transformers asks every cache layer for."""

    keys: torch.Tensor
    values: torch.Tensor
    is_sliding: bool = False
    is_linear: bool = False
    is_dummy: bool = False


@dataclass(frozen=True)
class KVCacheShape:
    """What a slot cache is made of. spare: positions of a slot that are written and never read, 0 or 1."""

    layers: int
    slots: int
    key_value_heads: int
    max_model_len: int
    head_dim: int
    dtype: torch.dtype
    spare: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one position of one row takes, keys and values, all layers."""
        return 2 * self.layers * self.key_value_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.slots * (self.max_model_len + self.spare) * self.bytes_per_token


class KVCache(Cache):
    """A transformers cache whose rows are slots. Not thread-safe: one forward pass at a time."""

    def __init__(self, shape: KVCacheShape, device: torch.device) -> None:
        size = (shape.slots, shape.key_value_heads, shape.max_model_len + shape.spare, shape.head_dim)
        self.slot_layers = [
            _SlotLayer(
                torch.zeros(size, dtype=shape.dtype, device=device), torch.zeros(size, dtype=shape.dtype, device=device)
            )
            for _ in range(shape.layers)
        ]
        super().__init__(layers=self.slot_layers)  # type: ignore[arg-type]  # the flags are all it is asked for
        self.shape = shape
        self._rows = slice(0, 0)
        self._span = 0
        self._slot_index = torch.arange(shape.slots, device=device)[:, None]
        self._positions = torch.empty(0, dtype=torch.long, device=device)

    def aim(self, first: int, positions: torch.Tensor, span: int) -> None:
        """Point the next forward pass at the slots `first` … `first + rows − 1`.

        positions: [rows, width], where each of the pass's tokens is written. span: attention reads positions
        0 … span − 1, so span exceeds every position that is not padding.
        """
        self._rows = slice(first, first + positions.shape[0])
        self._positions = positions
        self._span = span

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write this pass's [rows, heads, width, head dim]; return views of [rows, heads, span, head dim]."""
        layer = self.slot_layers[layer_idx]
        slots = self._slot_index[self._rows]
        # The two indices are separated by a slice, so the indexed part is [rows, width, heads, head dim].
        layer.keys[slots, :, self._positions] = key_states.transpose(1, 2)
        layer.values[slots, :, self._positions] = value_states.transpose(1, 2)
        return layer.keys[self._rows, :, : self._span], layer.values[self._rows, :, : self._span]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the span of the current pass: rows have lengths of their own, which the engine keeps."""
        return self._span

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return how many positions the current pass reads, and that they start at 0."""
        return self._span, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: only a prefill asks, and it starts at the first position."""
        return 0

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` over slot `target`."""
        for layer in self.slot_layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def wipe(self, slot: int) -> None:
        """Zero a slot, so that nothing that isn't finite is left to its next row."""
        for layer in self.slot_layers:
            layer.keys[slot].zero_()
            layer.values[slot].zero_()
