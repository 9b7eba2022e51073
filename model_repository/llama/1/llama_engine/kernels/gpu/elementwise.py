"""The elementwise operations around a GPU's products, each chain of them fused into one kernel by `torch.compile`.

Separately they would be some 100 launches a layer. Options keep the bits of PyTorch's separate operations: no fused
multiply-add, IEEE division, no flushed denormals. A fused function is compared with its separate operations when the
model loads; if a bit differs or compilation fails, the separate operations run. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from llama_engine.errors import one_line
from llama_engine.model.llama import Rotate, rotate

SPLIT = 254
"""Weight of the high term: a quantized activation of two terms is q = SPLIT · high + low."""

COMPILE_OPTIONS = {
    # Rounds intermediate results to their dtype, and disables fused multiply-add.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    # Compile in this process: a pool of processes would outlive the loading.
    "compile_threads": 1,
}
"""Options of `torch.compile`, from torch._inductor.config."""

_SMALLEST = 1e-30
"""Rows whose largest magnitude doesn't exceed this are quantized to zeros."""
_TRIAL_ROWS = (19, 1)
"""Rows of the trials: `torch.compile` makes one kernel for a single row and one for any other number."""

_log = logging.getLogger(__name__)

Quantize = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
Dequantize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype, int], torch.Tensor]


def quantize(rows: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows [n, in], floats; return terms [terms · n, in], int8, and scales [n, 1], float32.

    The high terms of all rows come first, then the low terms. The scale of a row that isn't finite is NaN.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True)
    # Not `127 / largest`, which torch rounds twice, as 127 · (1 / largest).
    scaled = rows * torch.where(largest > _SMALLEST, torch.full_like(largest, 127) / largest, 0)
    high = scaled.round()
    # 0 · infinity is NaN, which marks rows that aren't finite.
    scale = divide(largest + 0 * largest, 127)
    if terms == 1:
        return high.to(torch.int8), scale
    low = ((scaled - high) * SPLIT).round()
    return torch.cat((high.to(torch.int8), low.to(torch.int8))), divide(scale, SPLIT)


def dequantize(
    sums: torch.Tensor,
    scale: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    terms: int,
) -> torch.Tensor:
    """Return the output [n, out] in dtype for the products [terms · n, out], int32, of quantized rows.

    scale: [n, 1]. weight_scales, bias: [out], float32.
    """
    if terms == 2:
        high, low = sums.chunk(2)
        # The sum is exact in float64 and then rounded once.
        sums = low.double() + SPLIT * high.double()
    result = sums.float() * (scale * weight_scales)
    return (result if bias is None else result + bias).to(dtype)


def divide(values: torch.Tensor, divisor: int) -> torch.Tensor:
    """Return float32 values / divisor (below 2²³), rounded once.

    A GPU multiplies float32 by 1 / divisor, which rounds twice. In float64 that error is too small to matter: a quotient
    that is no float32 is at least 1 / (2 · divisor) of its last place away from where rounding changes.
    """
    return (values.double() / divisor).float()


class Elementwise(NamedTuple):
    """The elementwise functions of a pass on a GPU, fused or separate."""

    quantize: Quantize = quantize
    dequantize: Dequantize = dequantize
    rotate: Rotate = rotate


def choose_elementwise(
    device: torch.device, dtype: torch.dtype, hidden: int, heads: int, head_dim: int, terms: int | None
) -> Elementwise:
    """Return fused functions for a model on this device; log a warning and return separate ones if they can't be used.

    hidden, heads, head_dim: the model's, with the KV heads among the heads. terms: INT8 terms, None without INT8.
    """
    separate = Elementwise()
    fused = Elementwise(*(_fuse(function) for function in separate))
    try:
        with torch.inference_mode():
            for name, arguments in _trials(device, dtype, hidden, heads, head_dim, terms):
                expected = getattr(separate, name)(*arguments)
                result = getattr(fused, name)(*arguments)
                if not all(map(torch.equal, _tensors(result), _tensors(expected))):
                    raise RuntimeError(f"the bits of `{name}` differ")  # noqa: TRY301 - one handler for all failures
    except Exception as error:  # noqa: BLE001 - fall back to separate operations
        _log.warning("elementwise operations can't be fused; each is launched: %s", one_line(error))
        return separate
    return fused


def _fuse(function: Callable[..., object]) -> Callable[..., object]:
    return torch.compile(function, dynamic=True, fullgraph=True, options=COMPILE_OPTIONS)


def _tensors(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


def _trials(
    device: torch.device, dtype: torch.dtype, hidden: int, heads: int, head_dim: int, terms: int | None
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield names of functions and arguments of the model's shapes and dtypes."""
    random = torch.Generator(device).manual_seed(0)
    for rows in _TRIAL_ROWS:
        if terms is not None:
            activations = torch.randn(rows, hidden, device=device, generator=random)
            activations *= torch.arange(1, rows + 1, device=device)[:, None]
            activations[1:2] = 0
            yield "quantize", (activations.to(dtype), terms)
            sums = torch.randint(-(2**30), 2**30, (terms * rows, hidden), device=device, generator=random).int()
            scale, weight_scales, bias = torch.rand(rows + 2 * hidden, device=device, generator=random).split(
                (rows, hidden, hidden)
            )
            for offset in (None, bias):
                yield "dequantize", (sums, scale[:, None], weight_scales, offset, dtype, terms)
        states = torch.randn(rows, heads, head_dim, device=device, generator=random).to(dtype)
        angles = torch.randn(rows, 1, head_dim // 2, device=device, generator=random)
        yield "rotate", (states, angles.cos().to(dtype), angles.sin().to(dtype))
