"""Kernel selection: a fused kernel is used only if it was verified; otherwise the stock one, with one warning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from llama_engine.kernels import reference, selection
from llama_engine.kernels.selection import STOCK, Kernels, Shapes, choose_kernels

GPU = torch.device("cuda")
SHAPES = ((256, 1024), (64, 256))
INT8, ATTENTION = "llama_engine.kernels.int8_product", "llama_engine.kernels.decode_attention"
Choose = Callable[..., Kernels]


def stand_in(name: str, **members: object) -> ModuleType:
    """Return a module in place of one that only a GPU can run."""
    module = ModuleType(name)
    vars(module).update(members)
    return module


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Choose on the CPU as on a GPU, with stand-ins for the fused kernels.

    Always on the CPU: a GPU's matrix library may add up in another order for another number of rows.
    """

    def choose(int8_product: object = None, decode_attention: object = None, weights: Shapes = SHAPES) -> Kernels:
        product, attention = int8_product or reference.int8_product, decode_attention or row_by_row
        monkeypatch.setitem(sys.modules, INT8, stand_in(INT8, ROW_TILES=(16, 64), int8_product=product))
        monkeypatch.setitem(sys.modules, ATTENTION, stand_in(ATTENTION, SPAN=32, decode_attention=attention))
        monkeypatch.setattr(selection, "_check_support", lambda device: None)
        return selection._verified_kernels(torch.device("cpu"), torch.float16, 16, 2, weights)

    return choose


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.DEBUG)
    return lambda: [record.getMessage() for record in caplog.records if record.name == selection.__name__]


def row_by_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attend row by row, over each row's own positions."""
    rows = []
    for row, length in enumerate(lengths):
        one, span = slice(row, row + 1), max(int(length), 1)
        rows.append(
            reference.decode_attention(query[one], keys[one, :, :span], values[one, :, :span], lengths[one], scaling)
        )
    return torch.cat(rows)


def raising(*_: object) -> torch.Tensor:
    raise RuntimeError("out of resources: shared memory\nRequired: 300000")


def zeros(activations: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return activations.new_zeros(len(activations), len(weight))


def nans(activations: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return activations.new_full((len(activations), len(weight)), torch.nan)


def wrong_for_narrow_weights(
    activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return reference.int8_product(activations, weight, scales, bias) * (1 if len(weight) > 64 else 2)


def dependent_on_the_number_of_rows(
    activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Add up in one order for few rows and in another for many: right, and different in the last bits."""
    columns = torch.arange(weight.shape[1]) if len(activations) < 64 else torch.arange(weight.shape[1]).flip(0)
    product = torch.zeros(len(activations), len(weight))
    for block in torch.split(columns, 128):
        product += activations[:, block].float() @ weight[:, block].float().T
    return (product * scales * 1.0001 ** (len(activations) < 64)).to(activations.dtype)


def dependent_on_the_longest_row(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Scale by the span of the batch: within the tolerance, but dependent on the neighbours."""
    return reference.decode_attention(query, keys, values, lengths, scaling) * (1 + keys.shape[2] / 2**14)


def test_verified_kernels_are_chosen(choose: Choose, warnings: Callable[[], list[str]]) -> None:
    assert choose() == Kernels(few_rows=reference.int8_product, attention=row_by_row)
    assert warnings() == []


def test_a_model_without_8_bit_layers_does_not_try_their_product(
    choose: Choose, warnings: Callable[[], list[str]]
) -> None:
    assert choose(int8_product=raising, weights=()) == Kernels(attention=row_by_row)
    assert warnings() == []


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (raising, "out of resources: shared memory"),
        (zeros, "its result is wrong by 100.0% of the largest value"),
        (wrong_for_narrow_weights, "its result is wrong by 100.0% of the largest value"),
        (nans, "its result is wrong by nan% of the largest value"),
        (dependent_on_the_number_of_rows, "on this GPU a row's result among 16 differs from that among 64"),
    ],
)
def test_a_product_that_fails_verification_is_replaced_and_the_attention_kept(
    product: object, reason: str, choose: Choose, warnings: Callable[[], list[str]]
) -> None:
    assert choose(int8_product=product) == Kernels(attention=row_by_row)
    assert warnings() == [f"the fused 8-bit product can't be used, falling back to stock: RuntimeError: {reason}"]


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (raising, "out of resources: shared memory"),
        (dependent_on_the_longest_row, "on this GPU a row of length 1 depends on its neighbours"),
    ],
)
def test_an_attention_that_fails_verification_is_replaced_and_the_product_kept(
    attention: object, reason: str, choose: Choose, warnings: Callable[[], list[str]]
) -> None:
    assert choose(decode_attention=attention) == Kernels(few_rows=reference.int8_product)
    assert warnings() == [f"the fused decode attention can't be used, falling back to stock: RuntimeError: {reason}"]


def test_a_cpu_gets_stock_kernels_without_a_warning(warnings: Callable[[], list[str]]) -> None:
    assert choose_kernels(torch.device("cpu"), torch.float32, 64, 1, SHAPES) == STOCK
    assert warnings() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_pytorch_does_not_see_gets_stock_kernels(warnings: Callable[[], list[str]]) -> None:
    assert choose_kernels(GPU, torch.float16, 128, 1, SHAPES) == STOCK
    assert len(warnings()) == 2


def test_without_the_triton_language_the_kernels_are_stock(
    monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    monkeypatch.setattr(selection, "_check_support", lambda device: None)
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in (INT8, ATTENTION):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert choose_kernels(GPU, torch.float16, 128, 1, SHAPES) == STOCK
    for kernel, line in zip(("8-bit product", "decode attention"), warnings(), strict=True):
        assert f"the fused {kernel} can't be used, falling back to stock: ModuleNotFoundError: " in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("interpret", "capability", "reason"),
    [("1", (9, 0), "TRITON_INTERPRET is set"), ("0", (7, 5), "older than Ampere")],
)
def test_the_interpreter_and_old_gpus_get_stock_kernels(
    interpret: str,
    capability: tuple[int, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Callable[[], list[str]],
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_kernels(GPU, torch.float16, 128, 1, SHAPES) == STOCK
    assert [reason in line for line in warnings()] == [True, True]
