"""Makes linear layers of integers in groups of columns, each group with a scale and perhaps a zero point.

With a scale s, a zero point z and a saved integer u, W = s · (u - z). Groups of a size that the engine serves are kept:
W = s · (u - c) + s · (c - z) with the centre c = 2^(bits - 1); the second term is the group's offset. Others are
requantized to INT8 per channel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from llama_engine.checkpoint.formats.linear_format import Groups
from llama_engine.checkpoint.per_channel import for_each_block, quantize_per_channel, row_blocks
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError

SIZES = range(512, 0, -32)
"""Group sizes that the engine serves, largest first. Groups of a multiple of one are served as several, exactly."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GroupedIntegers:
    """The integers of a saved linear layer, less the centre.

    read: returns a range of rows, int8, [rows, in]; called in several threads. scales: [out, groups], float32. zeros:
    [out, groups], int8, the zero points less the centre; None: all 0. groups: [in], int64, the group of each column.
    name: the layer's.
    """

    read: Callable[[slice], torch.Tensor]
    scales: torch.Tensor
    zeros: torch.Tensor | None
    groups: torch.Tensor
    bits: int
    name: str

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        return len(self.scales), len(self.groups)

    def differences(self, rows: slice, integers: torch.Tensor) -> torch.Tensor:
        """Return u - z of a range of rows, float32, [rows, in]. integers: those rows, read."""
        values = integers.float()
        if self.zeros is not None:
            values -= self.zeros[rows].float()[:, self.groups]
        return values


def read_group_size(saved: SavedTensors, config: Mapping[str, Any], key: str = "group_size") -> int:
    """Return a quantization config's group size; -1 is one group per channel. Raises CheckpointError for others."""
    size = config.get(key, 128)
    if not isinstance(size, int) or size < -1 or size == 0:
        raise CheckpointError(f"{saved.source}: {key} is {size!r}, not a number of columns or -1")
    return size


def group_count(columns: int, size: int) -> int:
    """Return the number of groups of a channel. size: -1 is the whole channel."""
    return 1 if size == -1 else -(-columns // size)


def consecutive_groups(columns: int, size: int) -> torch.Tensor:
    """Return the group of each column, for groups of `size` consecutive columns, the last of which may be smaller.

    size: -1 is the whole channel.
    """
    return torch.arange(columns) // (columns if size == -1 else size)


def read_groups(saved: SavedTensors, name: str, count: int) -> torch.Tensor:
    """Return the saved group of each column. Raises CheckpointError for one that isn't among the `count` groups."""
    groups = saved.read(name).long()
    if len(outside := groups[(groups < 0) | (groups >= count)]):
        raise CheckpointError(f"{saved.source} has group {int(outside[0])} in {name}, not 0 to {count - 1}")
    return groups


def served_groups(columns: int, saved: Groups) -> Groups | None:
    """Return the groups in which `GroupedLinears` serves a layer with saved consecutive groups; None is per channel."""
    size = columns if saved.size == -1 else saved.size
    served = _served_size(size)
    if served is None or columns % size or (size == columns and saved.bits == 8 and not saved.has_offsets):
        return None
    return saved._replace(size=served)


def _served_size(size: int) -> int | None:
    """Return the size of the groups that serve one of `size` columns; None if there is none, or size is 0."""
    return next((served for served in SIZES if size and size % served == 0), None)


class GroupedLinears:
    """Makes the linear layers of one checkpoint, and logs once that some are requantized."""

    def __init__(self, saved: SavedTensors) -> None:
        self._source, self._logged = saved.source, False

    def linear(self, saved: GroupedIntegers) -> LinearWeight:
        """Return a layer without its bias: per channel for 8-bit integers with a scale each, else in groups.

        Raises CheckpointError if a scale is 0 and its weights aren't, which no quantizer saves.
        """
        zeros = saved.zeros if saved.zeros is not None and saved.zeros.any() else None
        sizes = saved.groups.bincount(minlength=saved.scales.shape[1])
        size = int(sizes[0])
        if len(sizes) == 1 and zeros is None and saved.bits == 8:
            return LinearWeight(self._integers(saved, None), saved.scales[:, 0].contiguous())
        served = _served_size(size)
        if served is None or (sizes != size).any():
            return self._requantized(saved)
        # The sort is stable, so that the order is the same for all layers with these groups.
        order = None if (saved.groups.diff() >= 0).all() else saved.groups.argsort(stable=True)
        offsets = None if zeros is None else saved.scales * -zeros.float()
        weight = LinearWeight(self._integers(saved, order), saved.scales, None, offsets, saved.bits, order)
        return weight if size == served else weight.in_groups(served)

    def _integers(self, saved: GroupedIntegers, order: torch.Tensor | None) -> torch.Tensor:
        """Return the integers [out, in] with their columns in this order."""
        result = torch.empty(saved.shape, dtype=torch.int8)

        def read(rows: slice) -> None:
            integers = saved.read(rows)
            self._check_zero_scales(saved, rows, integers)
            result[rows] = integers if order is None else integers[:, order]

        for_each_block(row_blocks(*saved.shape), read)
        return result

    def _requantized(self, saved: GroupedIntegers) -> LinearWeight:
        if not self._logged:
            self._logged = True
            _log.warning(
                "%s and others have groups of columns that are requantized to INT8 per channel: groups are served as "
                "saved if they have a multiple of %d columns and all of a layer have as many", saved.name, SIZES[-1]
            )  # fmt: skip
        weight, scales = torch.empty(saved.shape, dtype=torch.int8), torch.empty(len(saved.scales))

        def quantize(rows: slice) -> None:
            integers = saved.read(rows)
            self._check_zero_scales(saved, rows, integers)
            weight[rows], scales[rows] = quantize_per_channel(
                saved.differences(rows, integers) * saved.scales[rows][:, saved.groups]
            )

        for_each_block(row_blocks(*saved.shape), quantize)
        return LinearWeight(weight, scales)

    def _check_zero_scales(self, saved: GroupedIntegers, rows: slice, integers: torch.Tensor) -> None:
        scales = saved.scales[rows]
        if not scales.all() and (saved.differences(rows, integers)[scales[:, saved.groups] == 0] != 0).any():
            raise CheckpointError(f"{self._source} has a scale of 0 for weights of {saved.name} that aren't 0")
