"""Copies of numbers to and from a GPU that don't wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch


def to_device(
    values: torch.Tensor | Sequence[object], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return numbers as a tensor on the device, by an asynchronous copy.

    `torch.tensor(..., device=gpu)` copies from unpinned memory, which waits for all work queued on the GPU.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def lists_to_device(
    lists: Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return each list of integers as a tensor on the device, by a single copy."""
    together = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
    return torch.split(to_device(together, device), [len(values) for values in lists])


def to_host(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return tensors of one dtype as tensors of the host, by a single copy."""
    together = torch.cat([tensor.flatten() for tensor in tensors]).cpu()
    parts = torch.split(together, [tensor.numel() for tensor in tensors])
    return tuple(part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True))
