"""Where the GPU's kernels run in tests: on a GPU where there is one, else in the Triton language's interpreter.

The interpreter is chosen in tests/conftest.py, before anything imports the language. It runs one program after the
other in numpy: right, slow, and without what goes wrong between programs that run at once.
"""

from __future__ import annotations

import torch

# With its number, as tensors have it: to PyTorch "cuda" and "cuda:0" are two devices.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

NO_LANGUAGE = "the Triton language isn't installed; make test-kernels installs it"

# The interpreter's dot multiplies bfloat16's bits as if they were whole numbers.
DTYPES = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]


def randomness(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=randomness(seed)).to(dtype)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """One rounding of the result's dtype apart, for sums that were added in another order."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    allowed = torch.finfo(result.dtype).eps * expected.double().abs() + 1e-5 * expected.double().abs().max()
    assert ((result.double() - expected.double()).abs() <= allowed).all()
