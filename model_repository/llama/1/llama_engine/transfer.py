"""Copies from the host to a GPU that do not wait for the work queued on it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: torch.Tensor | Sequence[object], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return numbers as a tensor on the device.

    `torch.tensor(..., device=gpu)` waits until the GPU has done everything before it, as its memory isn't pinned.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
