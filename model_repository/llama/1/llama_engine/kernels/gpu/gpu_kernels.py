"""Selects the kernels of a decode step when the model loads: fused ones on a GPU that runs them correctly, else stock.

Each fused kernel is compiled, run on a small problem and compared with its reference. If that fails (no GPU, no Triton
language, a compiler error, a wrong result), the stock kernel is used and one warning is logged. Only an error that
destroys the CUDA context, such as an illegal address, ends the process.

The Triton language is the package `triton`, a part of PyTorch's CUDA builds but not of its CPU builds; it has nothing
to do with Triton the server. Only `int8_product` and `decode_attention` import it, and only the functions below import
those.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from llama_engine.errors import one_line
from llama_engine.kernels.gpu import gpu_reference

Int8Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(activations [rows, in], weight [out, in], scales [out], bias [out] or None) → [rows, out]."""

DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(query [rows, heads, dim], keys and values [slots, kv heads, span, dim], slots and lengths [rows], scaling) → as the
query."""

Shapes = Collection[tuple[int, int]]

TOLERANCE = 2e-2
"""Largest error of a fused kernel, relative to the reference's largest value: a few roundings of bfloat16."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """The selected kernels, specified in `gpu_reference`. None selects the stock kernel.

    few_rows: the 8-bit product of a decode step; stock is bitsandbytes'.
    many_rows: the 8-bit product of a prefill, whose rows are enough to amortize widening the whole weight.
    attention: of a decode step; stock is the model's own, with a mask.
    """

    few_rows: Int8Product | None = None
    many_rows: Int8Product = gpu_reference.int8_product
    attention: DecodeAttention | None = None

    def describe(self) -> str:
        """Name the fused kernels, for the log."""
        fused = [name for name, kernel in (("8-bit product", self.few_rows), ("attention", self.attention)) if kernel]
        return f"fused {' and '.join(fused)}" if fused else "stock kernels"


STOCK = Kernels()


def choose_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, group: int, weights: Shapes) -> Kernels:
    """Return the kernels for a model on this device; log a warning for each fused kernel that fails.

    dtype: of activations and KV cache. head_dim: of the attention. group: query heads per key-value head.
    weights: (out, in) of the model's 8-bit layers, each shape once.
    """
    return _verified_kernels(device, dtype, head_dim, group, weights) if device.type == "cuda" else STOCK


def _verified_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, group: int, weights: Shapes) -> Kernels:
    chosen = STOCK
    try:
        if weights:
            chosen = replace(chosen, few_rows=_verified_int8_product(device, dtype, weights))
    except Exception as error:  # noqa: BLE001 - a compiler can raise anything, and the stock kernel always works
        _log_fallback("8-bit product", error)
    try:
        chosen = replace(chosen, attention=_verified_decode_attention(device, dtype, head_dim, group))
    except Exception as error:  # noqa: BLE001 - as above
        _log_fallback("decode attention", error)
    return chosen


def _log_fallback(kernel: str, error: Exception) -> None:
    _log.warning("the fused %s can't be used, falling back to stock: %s", kernel, one_line(error))


def _check_support(device: torch.device) -> None:
    """Raise RuntimeError where the kernels would compile but be useless."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError("this GPU is older than Ampere and lacks the matrix instructions that the kernels use")
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on"):
        raise RuntimeError("TRITON_INTERPRET is set, which interprets kernels on the CPU")


def _verified_int8_product(device: torch.device, dtype: torch.dtype, weights: Shapes) -> Int8Product:
    """Return the fused product after checking every weight shape with every row tile: each is a program of its own."""
    _check_support(device)
    from llama_engine.kernels.gpu.int8_product import ROW_TILES, int8_product

    generator = torch.Generator(device).manual_seed(0)
    for outputs, inner in weights:
        activations = torch.randn(ROW_TILES[-1], inner, device=device, generator=generator).to(dtype)
        weight = torch.randint(-127, 128, (outputs, inner), device=device, generator=generator, dtype=torch.int8)
        scales = torch.rand(outputs, device=device, generator=generator) / 127
        full_batch = int8_product(activations, weight, scales, None)
        _compare(full_batch, gpu_reference.int8_product(activations, weight, scales, None))
        for rows in ROW_TILES:
            # Batch invariance (a row's result is the same bits in every batch) rests on this.
            if not torch.equal(int8_product(activations[:rows], weight, scales, None), full_batch[:rows]):
                raise RuntimeError(f"on this GPU a row's result among {rows} differs from that among {ROW_TILES[-1]}")
    return int8_product


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
