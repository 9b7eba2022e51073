"""Counters at which the programs of one kernel meet, so that the last one to arrive finishes what all have begun.

They are zeros before a kernel and after it: whoever finishes sets its counter back. So there is nothing to clear
between two kernels, nor between two runs of a CUDA graph. Not for two kernels at once: one stream a device.
"""

from __future__ import annotations

import torch

_FEWEST = 4096

_counters: dict[torch.device, list[torch.Tensor]] = {}


def counters(device: torch.device, count: int) -> torch.Tensor:
    """Return at least so many zeros, int32, the same ones every time."""
    known = _counters.setdefault(device, [])
    if not known or len(known[-1]) < count:
        # What has been outgrown is kept: a CUDA graph may have its address. A tensor that is made in inference mode
        # could only be written to in there.
        with torch.inference_mode(False):
            known.append(torch.zeros(max(count, _FEWEST), dtype=torch.int32, device=device))
    return known[-1]
