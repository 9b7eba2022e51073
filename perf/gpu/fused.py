"""The engine's own product with 8-bit weights, by itself: fused, as it is computed for many rows, and cut in many ways.

`llama_engine.kernels.int8_product` needs the Triton language and a GPU, so it is imported where it is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from llama_engine.kernels import reference

Product = Callable[[torch.Tensor], torch.Tensor]

_OUTPUTS, _INNER, _STAGES, _SPLITS = (32, 64, 128), (64, 128, 256), (3, 5), (1, 2, 4)
_SHARED_MEMORY = 200 << 10


class NoKernelError(Exception):
    """There is no fused product here; `str()` says why."""


def product(codes: torch.Tensor, scales: torch.Tensor) -> Product:
    """Return y = x (codes · scales)ᵀ by the engine's kernel. Raises NoKernelError, or what importing it raises.

    codes: [outputs, inputs], int8. scales: [outputs], float32, what a code of 1 is worth.
    """
    _refuse_without_cuda(codes)
    from llama_engine.kernels.int8_product import int8_product

    return lambda rows: int8_product(rows, codes, scales, None)


def plain_product(codes: torch.Tensor, scales: torch.Tensor) -> Product:
    """Return the same as the engine computes it for many rows: widened as a whole, then multiplied."""
    return lambda rows: reference.int8_product(rows, codes, scales, None)


def variants(codes: torch.Tensor, scales: torch.Tensor) -> Mapping[str, Product]:
    """Return the fused product with the weight cut in many ways, by what they are. Raises as `product` does."""
    _refuse_without_cuda(codes)
    from llama_engine.kernels.int8_product import Tiles, int8_product

    def cut(outputs: int, inner: int, stages: int, splits: int) -> Product:
        way = Tiles(outputs=outputs, inner=inner, stages=stages, splits=splits)
        return lambda rows: int8_product(rows, codes, scales, None, way)

    return {
        f"outputs {outputs}, inner {inner}, stages {stages}, splits {splits}": cut(outputs, inner, stages, splits)
        for outputs, inner, stages, splits in itertools.product(_OUTPUTS, _INNER, _STAGES, _SPLITS)
        # A block of the weight and one of 32 rows in 16 bits, so many times; what doesn't fit isn't worth compiling.
        if stages * inner * (outputs + 2 * 32) <= _SHARED_MEMORY
    }


def _refuse_without_cuda(codes: torch.Tensor) -> None:
    if codes.device.type != "cuda":
        raise NoKernelError("needs CUDA")
