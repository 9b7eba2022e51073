"""A kernel of three lines in the Triton language: can such a thing be compiled and run here?

The package `triton` comes along with PyTorch's CUDA builds; import this module only where a GPU is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _twice(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, 2 * tl.load(source + place))


def works(device: torch.device) -> bool:
    """Compile and run it, and say whether the result is right. Raises whatever the compiler raises."""
    source = torch.randn(1024, device=device)
    target = torch.full_like(source, torch.nan)
    _twice[(8,)](source, target, BLOCK=128)
    return torch.equal(target, 2 * source)
