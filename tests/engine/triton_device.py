"""Where the tests run GPU kernels: on a GPU where there is one, else in the Triton language's interpreter.

tests/conftest.py selects the interpreter before anything imports the language. It runs one program after the other in
numpy: correct, slow, and blind to races between concurrent programs.
"""

from __future__ import annotations

import torch

# With its index, as tensors have it: to PyTorch "cuda" and "cuda:0" are different devices.
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

NO_LANGUAGE = "the Triton language isn't installed; make test ROOM=kernels installs it"

# The interpreter's dot multiplies the bits of bfloat16 as integers.
DTYPES = [torch.float16] if DEVICE.type == "cpu" else [torch.float16, torch.bfloat16]


def randomness(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=randomness(seed)).to(dtype)


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Allow one rounding of the dtype: sums may be added in another order."""
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    allowed = torch.finfo(result.dtype).eps * expected.double().abs() + 1e-5 * expected.double().abs().max()
    assert ((result.double() - expected.double()).abs() <= allowed).all()
