"""Counters with which the programs of one kernel find the last one to arrive, which combines their partial results.

All counters are 0 before and after a kernel: the last program resets its counter, so nothing needs clearing between
kernels or replays of a CUDA graph. Two kernels must not run at once: use one stream per device.
"""

from __future__ import annotations

import torch

_FEWEST = 4096

_counters: dict[torch.device, list[torch.Tensor]] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Return at least `count` zeros, int32, the same memory at every call."""
    allocated = _counters.setdefault(device, [])
    if not allocated or len(allocated[-1]) < count:
        # Smaller tensors are kept: a CUDA graph may hold their address. Outside inference mode, because a tensor
        # allocated in it is read-only outside.
        with torch.inference_mode(False):
            allocated.append(torch.zeros(max(count, _FEWEST), dtype=torch.int32, device=device))
    return allocated[-1]
