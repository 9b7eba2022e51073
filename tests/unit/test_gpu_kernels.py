"""Kernel selection: a fused kernel is used only if it was verified; otherwise the stock one, with one warning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from llama_engine.kernels.gpu import gpu_kernels, gpu_reference
from llama_engine.kernels.gpu.gpu_kernels import STOCK, Kernels, Shapes, choose_kernels

SHAPES = ((256, 1024), (64, 256))
MODULES = {
    "8-bit product": "llama_engine.kernels.gpu.int8_product",
    "decode attention": "llama_engine.kernels.gpu.decode_attention",
}
Choose = Callable[..., Kernels]
Tensor = torch.Tensor


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Choose on the CPU as on a GPU, with stand-ins for the fused kernels, which only a GPU can run.

    Always on the CPU: a GPU's matrix library may add up in another order for another number of rows.
    """

    def choose(product: object = None, attention: object = None, weights: Shapes = SHAPES) -> Kernels:
        for module, members in zip(
            map(ModuleType, MODULES.values()),
            (
                {"ROW_TILES": (16, 64), "int8_product": product or gpu_reference.int8_product},
                {"SPAN": 32, "decode_attention": attention or _row_by_row},
            ),
            strict=True,
        ):
            vars(module).update(members)
            monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(gpu_kernels, "_check_support", lambda device: None)
        return gpu_kernels._verified_kernels(torch.device("cpu"), torch.float16, 16, 2, weights)

    return choose


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.DEBUG)
    return lambda: [record.getMessage() for record in caplog.records if record.name == gpu_kernels.__name__]


def _row_by_row(query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor, scaling: float) -> Tensor:
    """Attend row by row, over each row's own positions."""
    rows = []
    for row, length in enumerate(lengths):
        at, span = slice(row, row + 1), max(int(length), 1)
        cache = keys[:, :, :span], values[:, :, :span], slots[at], lengths[at]
        rows.append(gpu_reference.decode_attention(query[at], *cache, scaling))
    return torch.cat(rows)


def _raising(*_: object) -> Tensor:
    raise RuntimeError("out of resources: shared memory\nRequired: 300000")


def _filled(value: float) -> Callable[..., Tensor]:
    return lambda activations, weight, *_: activations.new_full((len(activations), len(weight)), value)


def _wrong_for_narrow_weights(activations: Tensor, weight: Tensor, *others: Tensor) -> Tensor:
    return gpu_reference.int8_product(activations, weight, *others) * (1 if len(weight) > 64 else 2)


def _dependent_on_the_number_of_rows(activations: Tensor, weight: Tensor, scales: Tensor, bias: object) -> Tensor:
    """Within the tolerance, but one rounding larger for few rows."""
    product = activations.float() @ weight.float().T * scales
    return (product * 1.001 ** (len(activations) < 64)).to(activations.dtype)


def _dependent_on_the_longest_row(query: Tensor, keys: Tensor, *others: Tensor) -> Tensor:
    """Scale by the span of the batch: within the tolerance, but dependent on the neighbours."""
    return gpu_reference.decode_attention(query, keys, *others) * (1 + keys.shape[2] / 2**14)  # type: ignore[arg-type]  # and a float


def test_verified_kernels_are_chosen(choose: Choose, warnings: Callable[[], list[str]]) -> None:
    assert choose() == Kernels(few_rows=gpu_reference.int8_product, attention=_row_by_row)
    # A model without 8-bit layers doesn't try their product.
    assert choose(product=_raising, weights=()) == Kernels(attention=_row_by_row)
    assert warnings() == []


@pytest.mark.parametrize(
    ("kernel", "fused", "reason"),
    [
        ("8-bit product", _raising, "out of resources: shared memory"),
        ("8-bit product", _wrong_for_narrow_weights, "its result is wrong by 100.0% of the largest value"),
        ("8-bit product", _filled(torch.nan), "its result is wrong by nan% of the largest value"),
        (
            "8-bit product",
            _dependent_on_the_number_of_rows,
            "on this GPU a row's result among 16 differs from that among 64",
        ),
        ("decode attention", _raising, "out of resources: shared memory"),
        (
            "decode attention",
            _dependent_on_the_longest_row,
            "on this GPU a row of length 1 depends on its neighbours",
        ),
    ],
)
def test_a_kernel_that_fails_verification_is_replaced(
    kernel: str, fused: object, reason: str, choose: Choose, warnings: Callable[[], list[str]]
) -> None:
    if kernel == "8-bit product":
        assert choose(product=fused) == Kernels(attention=_row_by_row)
    else:
        assert choose(attention=fused) == Kernels(few_rows=gpu_reference.int8_product)
    assert warnings() == [f"the fused {kernel} can't be used, falling back to stock: RuntimeError: {reason}"]


def test_a_cpu_gets_stock_kernels_without_a_warning(warnings: Callable[[], list[str]]) -> None:
    assert choose_kernels(torch.device("cpu"), torch.float32, 64, 1, SHAPES) == STOCK
    assert warnings() == []


@pytest.mark.parametrize(
    ("interpret", "capability", "reason"),
    [
        ("1", (9, 0), "TRITON_INTERPRET is set"),
        ("0", (7, 5), "older than Ampere"),
        # Without the Triton language, and without a GPU that PyTorch sees.
        ("0", (9, 0), "ModuleNotFoundError: "),
        ("0", None, ": "),
    ],
)
def test_where_the_kernels_cannot_run_they_are_stock(
    interpret: str, capability: tuple[int, int] | None, reason: str, monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
) -> None:  # fmt: skip
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in MODULES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    if capability is not None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    elif torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_kernels(torch.device("cuda"), torch.float16, 128, 1, SHAPES) == STOCK
    for kernel, line in zip(MODULES, warnings(), strict=True):
        assert line.startswith(f"the fused {kernel} can't be used, falling back to stock: ")
        assert reason in line
        assert "\n" not in line
