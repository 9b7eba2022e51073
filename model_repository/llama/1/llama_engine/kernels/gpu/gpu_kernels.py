"""Selects the attention of a decode step on a GPU at load: the fused kernel if it runs correctly, else stock.

The fused kernel is compiled, run on a small problem and compared with its reference. If that fails (no GPU, no Triton
language, a compiler error, a wrong result), the stock kernel is used and one warning is logged. Only an error that
destroys the CUDA context, such as an illegal address, ends the process.

The Triton language is the package `triton`, a part of PyTorch's CUDA builds but not of its CPU builds; it has nothing
to do with Triton the server. Only `decode_attention` imports it, and only a function below imports that.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from llama_engine.errors import one_line
from llama_engine.kernels.gpu import gpu_reference

DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(query [rows, heads, dim], keys and values [slots, kv heads, span, dim], slots and lengths [rows], scaling) → as the
query."""

TOLERANCE = 2e-2
"""Largest error of a fused kernel, relative to the reference's largest value: a few roundings of bfloat16."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """The selected kernels, specified in `gpu_reference`. None selects the stock kernel.

    attention: of a decode step; stock is PyTorch's, with a mask.
    """

    attention: DecodeAttention | None = None

    def describe(self) -> str:
        """Name the fused kernels, for the log."""
        return "fused attention" if self.attention else "stock kernels"


STOCK = Kernels()


def choose_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> Kernels:
    """Return the kernels for a model on this device; log a warning if the fused attention can't be used.

    dtype: of activations and KV cache. head_dim: of the attention. group: query heads per key-value head.
    """
    if device.type != "cuda":
        return STOCK
    try:
        return Kernels(_verified_decode_attention(device, dtype, head_dim, group))
    except Exception as error:  # noqa: BLE001 - a compiler can raise anything, and the stock kernel always works
        _log.warning("the fused decode attention can't be used, falling back to stock: %s", one_line(error))
        return STOCK


def _check_support(device: torch.device) -> None:
    """Raise RuntimeError where the kernels would compile but be useless."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError("this GPU is older than Ampere and lacks the matrix instructions that the kernels use")
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on"):
        raise RuntimeError("TRITON_INTERPRET is set, which interprets kernels on the CPU")


def _verified_decode_attention(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> DecodeAttention:
    """Return the fused attention after checking it on rows of very different lengths."""
    _check_support(device)
    from llama_engine.kernels.gpu.decode_attention import SPAN, decode_attention

    lengths = torch.tensor([1, SPAN + 3, 0, 2 * SPAN], device=device)
    generator = torch.Generator(device).manual_seed(0)
    query = torch.randn(len(lengths), 2 * group, head_dim, device=device, generator=generator).to(dtype)
    keys, values = torch.randn(2, len(lengths), 2, 2 * SPAN, head_dim, device=device, generator=generator).to(dtype)
    slots = torch.tensor([2, 0, 3, 1], device=device)
    together = decode_attention(query, keys, values, slots, lengths, head_dim**-0.5)
    _compare(together, gpu_reference.decode_attention(query, keys, values, slots, lengths, head_dim**-0.5))
    for row in range(len(lengths)):
        at = slice(row, row + 1)
        # The shortest span that holds the row: for short rows this is a different program.
        span = max(int(lengths[row]), 1)
        views = keys[:, :, :span], values[:, :, :span]
        alone = decode_attention(query[at], *views, slots[at], lengths[at], head_dim**-0.5)
        if not torch.equal(alone, together[at]):
            raise RuntimeError(f"on this GPU a row of length {int(lengths[row])} depends on its neighbours")
    return decode_attention


def _compare(result: torch.Tensor, expected: torch.Tensor) -> None:
    error = (result.double() - expected.double()).abs().max().item() / expected.double().abs().max().item()
    # Not `error > TOLERANCE`: a NaN fails too.
    if not error <= TOLERANCE:
        raise RuntimeError(f"its result is wrong by {error:.1%} of the largest value")
