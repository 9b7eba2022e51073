"""A minimal kernel in the Triton language, to try the compiler. Import only on a GPU: CUDA builds bring `triton`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _twice(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202, N803
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, 2 * tl.load(source + place))


def works(device: torch.device) -> bool:
    """Compile and run the kernel; return whether its result is right. Raises the compiler's errors."""
    source = torch.randn(1024, device=device)
    target = torch.full_like(source, torch.nan)
    _twice[(8,)](source, target, BLOCK=128)
    return torch.equal(target, 2 * source)
