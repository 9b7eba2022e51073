"""The elementwise operations around a GPU's products, each chain of them fused into one kernel by `torch.compile`.

Separately they would be some 100 launches a layer. Options keep the bits of PyTorch's separate operations: no fused
multiply-add, IEEE division, no flushed denormals. A fused function is compared with its separate operations when the
model loads; if a bit differs or compilation fails, its separate operations run. Nothing here has run on a GPU yet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from llama_engine.errors import one_line
from llama_engine.kernels.activation_terms import SPLIT

COMPILE_OPTIONS: dict[str, str | int | bool | Callable[..., object]] = {
    # Rounds intermediate results to their dtype, and disables fused multiply-add.
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    # Compile in this process: a pool of processes would outlive the loading.
    "compile_threads": 1,
    # PyTorch 2.11 drops a rounding to float32 between two in float64.
    "pattern_matcher": False,
}
"""Options of `torch.compile`, from torch._inductor.config."""

_SMALLEST = 1e-30
"""Tokens whose largest magnitude doesn't exceed this are quantized to zeros."""
_SELF_TEST_TOKENS = (19, 1)
"""Tokens of the self-tests: `torch.compile` makes one kernel for a single token and one for any other number."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(heads [n, heads, dim], cosine, sine [n, 1, rotary / 2]) → [n, heads, dim]."""

Quantize = Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
Dequantize = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype, int], torch.Tensor]


def quantize(activations: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the activations of tokens [n, in], floats; return terms [terms · n, in], int8, and scales [n, 1],
    float32.

    The high terms of all tokens come first, then the low terms. The scale of a token that isn't finite is NaN.
    """
    activations = activations.float()
    largest = activations.abs().amax(-1, keepdim=True)
    # Not `127 / largest`, which torch rounds twice, as 127 · (1 / largest).
    inverse = torch.where(largest > _SMALLEST, torch.full_like(largest, 127) / largest, 0)
    high = (activations * inverse).round()
    # Not `largest + 0 * largest`, which the compiler reduces to `largest`, also for infinity.
    scale = divide(torch.where(largest.isfinite(), largest, torch.nan), 127)
    if terms == 1:
        return high.to(torch.int8), scale
    low = (activations * (inverse * SPLIT)).round() - SPLIT * high
    return torch.cat((high.to(torch.int8), low.to(torch.int8))), divide(scale, SPLIT)


def dequantize(
    sums: torch.Tensor,
    scale: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    terms: int,
) -> torch.Tensor:
    """Return the output [n, out] in dtype for the products [terms · n, out], int32, of quantized tokens.

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

    On a GPU, PyTorch multiplies by 1 / divisor, which rounds twice. In float64 that is harmless: a quotient is at least
    1 / (2 · divisor) of a float32's last place away from a rounding boundary, far more than the error.
    """
    return (values.double() / divisor).float()


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to [n, heads, dim]; cosine, sine: [n, 1, rotary / 2].

    Pairs are (i, i + rotary / 2); dimensions from `rotary` on stay as they are.
    """
    rotary, dim = 2 * cosine.shape[-1], heads.shape[-1]
    if rotary < dim:
        rotated, others = torch.split(heads, [rotary, dim - rotary], dim=-1)
        return torch.cat((rotate(rotated, cosine, sine), others), dim=-1)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Elementwise(NamedTuple):
    """Quantization, dequantization and rotary embedding of a pass by PyTorch: fused, on a GPU only, or separate."""

    quantize: Quantize = quantize
    dequantize: Dequantize = dequantize
    rotary: Rotate = rotate


SEPARATE = Elementwise()


def choose_elementwise(
    device: torch.device, dtype: torch.dtype, hidden: int, heads: int, head_dim: int, terms: int | None
) -> Elementwise:
    """Return fused functions for a model on this device; log a warning for each that must stay separate.

    hidden, heads, head_dim: the model's, with the KV heads among the heads. terms: INT8 terms, None without INT8.
    """
    chosen = Elementwise(_fuse(quantize), _fuse(dequantize), _fuse(rotate))
    with torch.inference_mode():
        for name, arguments in _self_tests(device, dtype, hidden, heads, head_dim, terms):
            separate = getattr(SEPARATE, name)
            try:
                result, expected = getattr(chosen, name)(*arguments), separate(*arguments)
                if not all(map(torch.equal, _tensors(result), _tensors(expected))):
                    raise RuntimeError("its bits differ")
            except Exception as error:  # noqa: BLE001 - fall back to separate operations
                _log.warning("`%s` can't be fused; its operations are launched: %s", name, one_line(error))
                chosen = chosen._replace(**{name: separate})
    return chosen


def _fuse(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    return torch.compile(function, dynamic=True, fullgraph=True, options=COMPILE_OPTIONS)


def _tensors(result: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else result


def _self_tests(
    device: torch.device, dtype: torch.dtype, hidden: int, heads: int, head_dim: int, terms: int | None
) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield names of functions and arguments of the model's shapes and dtypes."""
    random = torch.Generator(device).manual_seed(0)
    for tokens in _SELF_TEST_TOKENS:
        if terms is not None:
            activations = torch.randn(tokens, hidden, device=device, generator=random)
            activations *= torch.arange(1, tokens + 1, device=device)[:, None]
            activations[1:2] = 0
            yield "quantize", (activations.to(dtype), terms)
            sums = torch.randint(-(2**30), 2**30, (terms * tokens, hidden), device=device, generator=random).int()
            scale = torch.rand(tokens, 1, device=device, generator=random)
            # Like a model's, these weights aren't created in inference mode; a difference would compile once more.
            with torch.inference_mode(mode=False):
                weight_scales, bias = (torch.rand(hidden, device=device, generator=random) for _ in range(2))
            for offset in (None, bias):
                yield "dequantize", (sums, scale, weight_scales, offset, dtype, terms)
        # A view, as in `Llama.forward`: the values follow the heads to be rotated.
        states = torch.randn(tokens, heads + 1, head_dim, device=device, generator=random).to(dtype)[:, :-1]
        angles = torch.randn(tokens, 1, head_dim // 2, device=device, generator=random)
        yield "rotary", (states, angles.cos().to(dtype), angles.sin().to(dtype))
