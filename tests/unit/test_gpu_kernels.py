"""Kernel selection: a fused kernel is used only if it was verified; otherwise the stock one, with one warning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from llama_engine.kernels.gpu import gpu_kernels, gpu_reference
from llama_engine.kernels.gpu.gpu_kernels import STOCK, DecodeAttention, Kernels, choose_kernels

MODULE = "llama_engine.kernels.gpu.decode_attention"
Choose = Callable[[DecodeAttention], Kernels]
Tensor = torch.Tensor


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Choose on the CPU as on a GPU, with stand-ins for the fused kernels, which only a GPU can run.

    Always on the CPU: a GPU's matrix library may add up in another order for another number of rows.
    """

    def choose(attention: DecodeAttention) -> Kernels:
        module = ModuleType(MODULE)
        vars(module).update(SPAN=32, decode_attention=attention)
        monkeypatch.setitem(sys.modules, MODULE, module)
        monkeypatch.setattr(gpu_kernels, "_check_support", lambda device: None)
        verified = gpu_kernels._verified_decode_attention
        cpu = torch.device("cpu")
        monkeypatch.setattr(gpu_kernels, "_verified_decode_attention", lambda _, *others: verified(cpu, *others))
        return choose_kernels(torch.device("cuda"), torch.float16, 16, 2)

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


def _nan(query: Tensor, *_: object) -> Tensor:
    return query * torch.nan


def _dependent_on_the_longest_row(query: Tensor, keys: Tensor, *others: Tensor) -> Tensor:
    """Scale by the span of the batch: within the tolerance, but dependent on the neighbours."""
    return gpu_reference.decode_attention(query, keys, *others) * (1 + keys.shape[2] / 2**14)  # type: ignore[arg-type]  # and a float


def test_a_verified_attention_is_chosen(choose: Choose, warnings: Callable[[], list[str]]) -> None:
    assert choose(_row_by_row) == Kernels(_row_by_row)
    assert warnings() == []


@pytest.mark.parametrize(
    ("fused", "reason"),
    [
        (_raising, "out of resources: shared memory"),
        (_nan, "its result is wrong by nan% of the largest value"),
        (_dependent_on_the_longest_row, "on this GPU a row of length 1 depends on its neighbours"),
    ],
)
def test_an_attention_that_fails_verification_is_replaced(
    fused: DecodeAttention, reason: str, choose: Choose, warnings: Callable[[], list[str]]
) -> None:
    assert choose(fused) == STOCK
    assert warnings() == [f"the fused decode attention can't be used, falling back to stock: RuntimeError: {reason}"]


def test_a_cpu_gets_stock_kernels_without_a_warning(warnings: Callable[[], list[str]]) -> None:
    assert choose_kernels(torch.device("cpu"), torch.float32, 64, 1) == STOCK
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
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    if capability is not None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    elif torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert choose_kernels(torch.device("cuda"), torch.float16, 128, 1) == STOCK
    (line,) = warnings()
    assert line.startswith("the fused decode attention can't be used, falling back to stock: ")
    assert reason in line
    assert "\n" not in line
