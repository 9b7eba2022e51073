"""Which form of the decode step's products is used: the fused one on a GPU that can, else the stock one.

Chosen once, when the model loads, by trying: the fused form is compiled, run on a small problem and held against the
plain one. What goes wrong there (no GPU, no Triton language, one that can't compile for this GPU, a wrong result) costs
one line in the log and nothing else; only what breaks the GPU's context, an address that isn't there, ends the process.
Knows no layers and no engine.

The Triton language is the package `triton`, which comes along with PyTorch's CUDA builds and not with its CPU builds;
it has nothing to do with Triton the server. Only `int8_kernel` and `attention_kernel` import it, and only this module
imports those, inside a function.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

import torch

from llama_engine.errors import one_line
from llama_engine.kernels import reference

Int8Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(activations [rows, in], weight [out, in], scales [out], bias [out] or None) → [rows, out]."""

DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(query [rows, heads, dim], keys and values [rows, kv heads, span, dim], lengths [rows], scaling) → as the query."""

Shapes = Collection[tuple[int, int]]

TOLERANCE = 2e-2
"""How far a fused result may lie from the plain one, in parts of the plain one's largest value: some roundings of
bfloat16. What is wrong is wrong by much more."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """The chosen forms; the contracts are `reference`'. None of them is what there is without: the stock one.

    few_rows: the 8-bit product of a decode step; None leaves 8-bit layers to bitsandbytes.
    many_rows: the product of a prefill, which has enough rows to pay for widening the whole weight.
    attention: of a decode step; None leaves it to the model, behind a mask.
    """

    few_rows: Int8Product | None = None
    many_rows: Int8Product = reference.int8_product
    attention: DecodeAttention | None = None

    def describe(self) -> str:
        """Return in a few words what isn't stock."""
        fused = [name for name, form in (("8-bit product", self.few_rows), ("attention", self.attention)) if form]
        return f"fused {' and '.join(fused)}" if fused else "stock kernels"


STOCK = Kernels()


def choose_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, group: int, weights: Shapes) -> Kernels:
    """Return the kernels for a model on this device, with one log line for each that can't be the fused one.

    dtype: of activations and cache. head_dim, group: of the attention; query heads that share a key-value head.
    weights: (out, in) of the model's 8-bit layers that take these products, each shape once.
    """
    return _tried(device, dtype, head_dim, group, weights) if device.type == "cuda" else STOCK


def _tried(device: torch.device, dtype: torch.dtype, head_dim: int, group: int, weights: Shapes) -> Kernels:
    chosen = STOCK
    try:
        if weights:
            chosen = replace(chosen, few_rows=_tried_int8_product(device, dtype, weights))
    except Exception as error:  # noqa: BLE001 - a compiler can fail in any way, and the stock form always works
        _log_stock("8-bit product", error)
    try:
        chosen = replace(chosen, attention=_tried_decode_attention(device, dtype, head_dim, group))
    except Exception as error:  # noqa: BLE001 - as above
        _log_stock("decode attention", error)
    return chosen


def _log_stock(what: str, error: Exception) -> None:
    _log.warning("the fused %s can't be used, the stock one is: %s", what, one_line(error))


def _refuse(device: torch.device) -> None:
    """Raise RuntimeError where a kernel would compile or run, but to no good."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        raise RuntimeError("this GPU is older than Ampere, whose matrix instructions it is made for")
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on"):
        raise RuntimeError("TRITON_INTERPRET is set, which would run kernels on the CPU, one program after the other")


def _tried_int8_product(device: torch.device, dtype: torch.dtype, weights: Shapes) -> Int8Product:
    """Return the fused product, once it has been right for every shape and every number of rows that a program is for.

    How a weight is cut depends on its shape, so that each is a program of its own too.
    """
    _refuse(device)
    from llama_engine.kernels.int8_product import ROW_TILES, int8_product

    generator = torch.Generator(device).manual_seed(0)
    for outputs, inner in weights:
        activations = torch.randn(ROW_TILES[-1], inner, device=device, generator=generator).to(dtype)
        weight = torch.randint(-127, 128, (outputs, inner), device=device, generator=generator, dtype=torch.int8)
        scales = torch.rand(outputs, device=device, generator=generator) / 127
        everything = int8_product(activations, weight, scales, None)
        _compare(everything, reference.int8_product(activations, weight, scales, None))
        for rows in ROW_TILES:
            # The promise that a row's result doesn't depend on its neighbours rests on this.
            if not torch.equal(int8_product(activations[:rows], weight, scales, None), everything[:rows]):
                raise RuntimeError(f"on this GPU a row's result among {rows} differs from that among {ROW_TILES[-1]}")
    return int8_product


def _tried_decode_attention(device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> DecodeAttention:
    """Return the fused attention, once it has been right for rows of very different lengths."""
    _refuse(device)
    from llama_engine.kernels.decode_attention import SPAN, decode_attention

    lengths = torch.tensor([1, SPAN + 3, 0, 2 * SPAN], device=device)
    generator = torch.Generator(device).manual_seed(0)
    query = torch.randn(len(lengths), 2 * group, head_dim, device=device, generator=generator).to(dtype)
    keys, values = torch.randn(2, len(lengths), 2, 2 * SPAN, head_dim, device=device, generator=generator).to(dtype)
    together = decode_attention(query, keys, values, lengths, head_dim**-0.5)
    _compare(together, reference.decode_attention(query, keys, values, lengths, head_dim**-0.5))
    for row in range(len(lengths)):
        one = slice(row, row + 1)
        # With no more of a span than the row needs, which for a short one is another program.
        span = max(int(lengths[row]), 1)
        alone = decode_attention(query[one], keys[one, :, :span], values[one, :, :span], lengths[one], head_dim**-0.5)
        if not torch.equal(alone, together[one]):
            raise RuntimeError(f"on this GPU a row of length {int(lengths[row])} depends on its neighbours")
    return decode_attention


def _compare(result: torch.Tensor, expected: torch.Tensor) -> None:
    error = (result.double() - expected.double()).abs().max().item() / expected.double().abs().max().item()
    if not error <= TOLERANCE:
        raise RuntimeError(f"its result is wrong by {error:.1%} of the largest value")
