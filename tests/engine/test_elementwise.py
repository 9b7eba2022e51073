"""Elementwise functions of a GPU: fused ones are used only if they have the same bits, and quotients are exact."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from llama_engine.kernels.gpu import elementwise
from llama_engine.kernels.gpu.elementwise import SEPARATE, choose_elementwise

CPU = torch.device("cpu")
HIDDEN, HEADS, HEAD_DIM = 256, 6, 16


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


# PyTorch's compiler calls it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.long
def test_a_function_with_the_same_bits_is_used_and_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_elementwise(CPU, torch.float32, HIDDEN, HEADS, HEAD_DIM, None)
    assert chosen.rotary != SEPARATE.rotary
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        # The values follow the heads to be rotated.
        heads, angles = torch.randn(7, HEADS + 1, HEAD_DIM)[:, :-1], torch.randn(7, 1, HEAD_DIM // 2)
        result = chosen.rotary(heads, angles.cos(), angles.sin())
        assert torch.equal(result, SEPARATE.rotary(heads, angles.cos(), angles.sin()))
    torch._dynamo.reset()
    assert not [record for record in caplog.records if record.name == elementwise.__name__]


@pytest.mark.parametrize("divisor", [127, 254])
def test_a_quotient_is_rounded_once(divisor: int) -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(3)) * 1000
    # On a GPU, PyTorch multiplies by the reciprocal.
    by_reciprocal = (values.double() * (1 / divisor)).float()
    assert torch.equal(elementwise.divide(values, divisor), values / torch.full_like(values, divisor))
    assert torch.equal(by_reciprocal, values / torch.full_like(values, divisor))
