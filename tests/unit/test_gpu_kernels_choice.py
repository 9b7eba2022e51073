"""Which kernels a model gets: the fused ones only where they have been right, and one log line where they can't be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from llama_engine.kernels import reference
from llama_engine.kernels import selection as kernels
from llama_engine.kernels.selection import STOCK, Kernels, Shapes, choose_kernels

GPU = torch.device("cuda")
SHAPES = ((256, 1024), (64, 256))
INT8, ATTENTION = "llama_engine.kernels.int8_product", "llama_engine.kernels.decode_attention"


def _stand_in(name: str, **members: object) -> ModuleType:
    """A module in the place of one that only a GPU can run."""
    module = ModuleType(name)
    vars(module).update(members)
    return module


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernels]:
    """Choose on the CPU as if it were a GPU, with stand-ins for the fused forms.

    Not on a GPU where there is one: its matrix library adds up in another order for another number of rows.
    """

    def choose(int8_product: object = None, decode_attention: object = None, weights: Shapes = SHAPES) -> Kernels:
        product, attention = int8_product or reference.int8_product, decode_attention or _by_itself
        monkeypatch.setitem(sys.modules, INT8, _stand_in(INT8, ROW_TILES=(16, 64), int8_product=product))
        monkeypatch.setitem(sys.modules, ATTENTION, _stand_in(ATTENTION, SPAN=32, decode_attention=attention))
        monkeypatch.setattr(kernels, "_check_support", lambda device: None)
        return kernels._verified_kernels(torch.device("cpu"), torch.float16, 16, 2, weights)

    return choose


def _by_itself(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attend row by row, over each row's own positions."""
    rows = [
        reference.decode_attention(
            query[row : row + 1],
            keys[row : row + 1, :, : max(int(length), 1)],
            values[row : row + 1, :, : max(int(length), 1)],
            lengths[row : row + 1],
            scaling,
        )
        for row, length in enumerate(lengths)
    ]
    return torch.cat(rows)


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == kernels.__name__]


def test_a_cpu_tries_the_gpus_kernels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    assert choose_kernels(torch.device("cpu"), torch.float32, 64, 1, SHAPES) == STOCK
    assert _lines(caplog) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_pytorch_cannot_see_fails_the_load(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_kernels(GPU, torch.float16, 128, 1, SHAPES) == STOCK
    assert len(_lines(caplog)) == 2


def test_a_missing_language_fails_the_load_or_goes_unsaid(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_check_support", lambda device: None)
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in (INT8, ATTENTION):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert choose_kernels(GPU, torch.float16, 128, 1, SHAPES) == STOCK
    product, attention = _lines(caplog)
    assert "the fused 8-bit product can't be used, falling back to stock: ModuleNotFoundError: " in product
    assert "the fused decode attention can't be used, falling back to stock: ModuleNotFoundError: " in attention
    assert "\n" not in product + attention


def test_kernels_that_are_right_are_not_chosen(
    usable: Callable[..., Kernels], caplog: pytest.LogCaptureFixture
) -> None:
    chosen = usable()
    assert chosen == Kernels(few_rows=reference.int8_product, attention=_by_itself)
    assert _lines(caplog) == []


def test_a_model_without_8_bit_layers_hears_of_their_product(
    usable: Callable[..., Kernels], caplog: pytest.LogCaptureFixture
) -> None:
    assert usable(int8_product=_raising, weights=()) == Kernels(attention=_by_itself)
    assert _lines(caplog) == []


def _raising(*_: object) -> torch.Tensor:
    raise RuntimeError("out of resources: shared memory\nRequired: 300000")


def _zeros(activations: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return activations.new_zeros(len(activations), len(weight))


def _not_numbers(activations: torch.Tensor, weight: torch.Tensor, *_: object) -> torch.Tensor:
    return activations.new_full((len(activations), len(weight)), torch.nan)


def _wrong_when_narrow(
    activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return reference.int8_product(activations, weight, scales, bias) * (1 if len(weight) > 64 else 2)


def _by_number_of_rows(
    activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Add up in one order for few rows and in another for many: right, and different in the last bit."""
    order = torch.arange(weight.shape[1]) if len(activations) < 64 else torch.arange(weight.shape[1]).flip(0)
    product = torch.zeros(len(activations), len(weight))
    for start in range(0, len(order), 128):
        column = order[start : start + 128]
        product += activations[:, column].float() @ weight[:, column].float().T
    return (product * scales * 1.0001 ** (len(activations) < 64)).to(activations.dtype)


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (_raising, "RuntimeError: out of resources: shared memory"),
        (_zeros, "RuntimeError: its result is wrong by 100.0% of the largest value"),
        (_wrong_when_narrow, "RuntimeError: its result is wrong by 100.0% of the largest value"),
        (_not_numbers, "RuntimeError: its result is wrong by nan% of the largest value"),
        (_by_number_of_rows, "RuntimeError: on this GPU a row's result among 16 differs from that among 64"),
    ],
)
def test_a_product_that_fails_is_used_or_takes_the_attention_with_it(
    product: object, reason: str, usable: Callable[..., Kernels], caplog: pytest.LogCaptureFixture
) -> None:
    assert usable(int8_product=product) == Kernels(attention=_by_itself)
    assert _lines(caplog) == [f"the fused 8-bit product can't be used, falling back to stock: {reason}"]


def _of_all_positions(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, lengths: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Scale by what the longest row has: nearly right, but not the row's own."""
    return reference.decode_attention(query, keys, values, lengths, scaling) * (1 + keys.shape[2] / 2**14)


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (_raising, "RuntimeError: out of resources: shared memory"),
        (_of_all_positions, "RuntimeError: on this GPU a row of length 1 depends on its neighbours"),
    ],
)
def test_an_attention_that_fails_is_used_or_takes_the_product_with_it(
    attention: object, reason: str, usable: Callable[..., Kernels], caplog: pytest.LogCaptureFixture
) -> None:
    assert usable(decode_attention=attention) == Kernels(few_rows=reference.int8_product)
    assert _lines(caplog) == [f"the fused decode attention can't be used, falling back to stock: {reason}"]


def test_kernels_are_used_on_a_gpu_while_the_interpreter_is_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert choose_kernels(GPU, torch.float16, 128, 1, SHAPES) == STOCK
    assert all("TRITON_INTERPRET is set" in line for line in _lines(caplog))


def test_a_gpu_without_the_matrix_instructions_is_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose_kernels(GPU, torch.float16, 128, 1, SHAPES) == STOCK
    assert all("older than Ampere" in line for line in _lines(caplog))
