"""Host-to-GPU copies that don't synchronize with the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(
    values: torch.Tensor | Sequence[object], device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return numbers as a tensor on the device, by an asynchronous copy.

    `torch.tensor(..., device=gpu)` copies from unpinned memory, which waits for all work queued on the GPU.
    """
    tensor = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=dtype)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
