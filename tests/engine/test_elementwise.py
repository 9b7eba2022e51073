"""Elementwise functions of a GPU, fused by `torch.compile` on a CPU: the same bits, and compiled only when loading."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from llama_engine.kernels.gpu import elementwise
from llama_engine.kernels.gpu.elementwise import SEPARATE, choose_elementwise

CPU = torch.device("cpu")
# PyTorch's compiler calls it.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
HIDDEN, HEADS, HEAD_DIM = 256, 6, 16


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    """Leave no compiled function behind for other tests."""
    yield
    torch._dynamo.reset()


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "terms"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.float32, 1)])
def test_fused_functions_have_the_same_bits_in_any_shape(dtype: torch.dtype, terms: int) -> None:
    fused = choose_elementwise(CPU, dtype, HIDDEN, HEADS, HEAD_DIM, terms)
    assert fused != SEPARATE
    random = torch.Generator().manual_seed(2)
    # Weights aren't created in inference mode, activations are.
    weights = torch.rand(2, 1100, generator=random)
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (1, 2, 3, 64, 301):
            for width in (64, HIDDEN, 1100):
                activations = (100 * torch.randn(rows, width, generator=random)).to(dtype)
                quantized, scale = SEPARATE.quantize(activations, terms)
                for result, expected in zip(fused.quantize(activations, terms), (quantized, scale), strict=True):
                    assert torch.equal(result, expected)
                sums = torch.randint(-(2**31), 2**31, (terms * rows, width), generator=random).int()
                with torch.inference_mode(mode=False):
                    weight_scales, bias = weights[:, :width].clone()
                for offset in (None, bias):
                    arguments = (sums, scale, weight_scales, offset, dtype, terms)
                    assert torch.equal(fused.dequantize(*arguments), SEPARATE.dequantize(*arguments))
            states = torch.randn(rows, HEADS + 2, HEAD_DIM, generator=random).to(dtype)[:, :-2]
            tables = [torch.randn(rows, 1, HEAD_DIM // 2, generator=random).to(dtype) for _ in range(2)]
            assert torch.equal(fused.rotary(states, *tables), SEPARATE.rotary(states, *tables))


def _failing(_: Callable[..., object]) -> Callable[..., object]:
    def compiled(*_: object) -> object:
        raise RuntimeError("Failed to find C compiler")

    return compiled


def _inexact(function: Callable[..., torch.Tensor]) -> Callable[..., object]:
    return function if function.__name__ != "rotate" else lambda *arguments: function(*arguments) * 1.001


@pytest.mark.parametrize(
    ("fuse", "names", "reason"),
    [
        (_failing, ["quantize", "dequantize", "rotary"], "Failed to find C compiler"),
        (_inexact, ["rotary"], "its bits differ"),
    ],
)
def test_functions_that_fail_or_differ_are_not_used(
    fuse: Callable[..., object],
    names: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(elementwise, "_fuse", fuse)
    assert choose_elementwise(CPU, torch.float16, HIDDEN, HEADS, HEAD_DIM, 2) == SEPARATE
    assert caplog.messages == [
        f"`{name}` can't be fused; its operations are launched: RuntimeError: {reason}" for name in names
    ]


@pytest.mark.parametrize("divisor", [127, 254])
def test_a_quotient_is_rounded_once(divisor: int) -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(3)) * 1000
    # On a GPU, PyTorch multiplies by the reciprocal.
    by_reciprocal = (values.double() * (1 / divisor)).float()
    assert torch.equal(elementwise.divide(values, divisor), values / torch.full_like(values, divisor))
    assert torch.equal(by_reciprocal, values / torch.full_like(values, divisor))
