"""The KV cache: keys and values of every slot, allocated once.

Per layer two tensors of [slots, KV heads, max_model_len, head dim]. The slots in use are always the first ones, so that
attention reads a view and not a copy. A forward pass covers consecutive slots, each at its own positions; `bind`
selects them before the model calls `update`.

Positions beyond a sequence's length hold stale values, which the attention mask hides. They must be finite: a masked
score times a stale NaN is NaN. Hence zeros at the start, and `zero` after a sequence that overflowed.

With `spare`, every slot has one more position: padding rows of a captured decode step write there, because the slot
they stand in may belong to another sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache


@dataclass
class _SlotLayer:
    """One layer; transformers reads the flags of every cache layer."""

    keys: torch.Tensor
    values: torch.Tensor
    is_sliding: bool = False
    is_linear: bool = False
    is_dummy: bool = False


@dataclass(frozen=True)
class KVCacheShape:
    """Dimensions of the KV cache. spare: extra positions per slot that are written and never read, 0 or 1."""

    layers: int
    slots: int
    key_value_heads: int
    max_model_len: int
    head_dim: int
    dtype: torch.dtype
    spare: int = 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes per position and slot: keys and values of all layers."""
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
        super().__init__(layers=self.slot_layers)  # type: ignore[arg-type]  # transformers reads the flags only
        self.shape = shape
        self._rows = slice(0, 0)
        self._span = 0
        self._slot_index = torch.arange(shape.slots, device=device)[:, None]
        self._positions = torch.empty(0, dtype=torch.long, device=device)

    def bind(self, first: int, positions: torch.Tensor, span: int) -> None:
        """Select the slots `first` … `first + rows − 1` for the next forward pass.

        positions: [rows, width], where each token of the pass is written. span: attention reads positions
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
        """Return the span of the current pass; each sequence has a length of its own."""
        return self._span

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of positions that the current pass reads, and their offset."""
        return self._span, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0: only a prefill asks, and it starts at the first position."""
        return 0

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of slot `source` to slot `target`."""
        for layer in self.slot_layers:
            layer.keys[target, :, :length] = layer.keys[source, :, :length]
            layer.values[target, :, :length] = layer.values[source, :, :length]

    def zero(self, first: int, last: int) -> None:
        """Zero the slots `first` … `last` − 1, so that their next sequences find only finite values."""
        for layer in self.slot_layers:
            layer.keys[first:last].zero_()
            layer.values[first:last].zero_()
