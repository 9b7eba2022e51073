"""Which product with INT8 weights a CPU uses: the first that is exact and fast, decided by its results."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from engine.int8_layers import in_float64, random_weight, threads
from llama_engine.model import int8_selection
from llama_engine.model.exact_int8 import ExactInt8Linear, Int8Packer, WidenedInt8Linear
from llama_engine.model.int8_selection import FORMS, select_form
from llama_engine.model.integer_product import MAX_INPUTS, NARROW, SIGNED, UNSIGNED, Form, IntegerProduct

Fault = Callable[[torch.Tensor], torch.Tensor]

SHAPE = (40, 96)


@pytest.fixture(autouse=True)
def _a_new_process() -> Iterator[None]:
    """Forget what has been selected, before and after a test."""
    caches = select_form, int8_selection._forms_of_this_process
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def _saturate(sums: torch.Tensor) -> torch.Tensor:
    return sums.clamp(-1000, 1000)


def _off_by_one(sums: torch.Tensor) -> torch.Tensor:
    sums[-1, -1] = sums[-1, -1].nextafter(torch.tensor(torch.inf))
    return sums


def _nan(sums: torch.Tensor) -> torch.Tensor:
    return sums * torch.nan


def _raise(sums: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(f"no product of {tuple(sums.shape)}")


def _dawdle(sums: torch.Tensor) -> torch.Tensor:
    start = time.thread_time()
    while time.thread_time() < start + 0.02:
        pass
    return sums


def _break(monkeypatch: pytest.MonkeyPatch, faults: dict[Form, Fault], outputs: int | None = None) -> None:
    """Have every form but the faulty ones computed in float64, so that the processor plays no part.

    outputs: of the weights whose products are faulty; None for all.
    """

    class Product(IntegerProduct):
        def __init__(self, weight: torch.Tensor, scales: torch.Tensor, form: Form) -> None:
            self._weight, self._scales, self._form = weight.double(), scales, form

        def __call__(self, terms: torch.Tensor) -> torch.Tensor:
            sums = ((terms.double() - self._form.zero_point) @ self._weight.T).float() * self._scales
            faulty = self._form in faults and outputs in (None, len(self._weight))
            return faults[self._form](sums) if faulty else sums

    monkeypatch.setattr(int8_selection, "IntegerProduct", Product)
    # Float64 is slower than oneDNN; `_dawdle` is slower by far.
    monkeypatch.setattr(int8_selection, "SLOW", 50)


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (_saturate, r"sums of 1 rows are wrong by \d+\.\d% of the largest"),
        (_off_by_one, r"sums of 1 rows are wrong by 0\.0% of the largest"),
        (_nan, "sums of 1 rows are wrong by nan%"),
        (_raise, "NotImplementedError: no product of"),
        (_dawdle, r"\d+ times slower than widened weights"),
    ],
)
@pytest.mark.parametrize("faulty", [1, 2, 3])
def test_the_first_form_without_a_fault_is_used_and_one_line_says_why(
    faulty: int,
    fault: Fault,
    reason: str,
    terms: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _break(monkeypatch, dict.fromkeys(FORMS[:faulty], fault))
    caplog.set_level(logging.INFO)
    chosen = select_form(*SHAPE, terms)
    assert chosen == [UNSIGNED, NARROW, None][faulty - 1]
    assert select_form(SHAPE[0] + 1, SHAPE[1], terms) == chosen
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if faulty == 1 else logging.WARNING)
    used = ["unsigned 8-bit terms", "unsigned 7-bit terms", "weights widened to float32"][faulty - 1]
    assert f": {used}; not signed 8-bit terms: " in record.message
    assert re.search(reason, record.message)


def test_without_a_fault_the_first_form_is_used_and_nothing_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _break(monkeypatch, {})
    caplog.set_level(logging.INFO)
    assert select_form(*SHAPE, 2) == SIGNED
    assert caplog.records == []


def test_a_shape_with_a_fault_of_its_own_falls_back_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _break(monkeypatch, {SIGNED: _saturate, UNSIGNED: _raise}, outputs=SHAPE[0])
    assert (select_form(*SHAPE, 2), select_form(41, 96, 2)) == (NARROW, SIGNED)
    assert [record.message[:40] for record in caplog.records] == ["INT8 product of 40 x 96 with 2 of: unsig"]


def test_more_inputs_than_int32_can_sum_are_widened(caplog: pytest.LogCaptureFixture) -> None:
    assert select_form(8, MAX_INPUTS + 1, 2) is None
    (record,) = caplog.records
    assert (
        record.message == "INT8 product of 8 x 65794: weights widened to float32; sums of more than 65793 leave int32"
    )
    weight = random_weight(8, MAX_INPUTS + 1)
    layer = Int8Packer(2)(weight)
    assert isinstance(layer, WidenedInt8Linear)
    activations = torch.randn(2, MAX_INPUTS + 1)
    torch.testing.assert_close(layer(activations).double(), in_float64(activations, weight), rtol=1e-4, atol=1e-2)


def test_a_model_names_every_product_that_its_layers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    forms: dict[tuple[int, int], Form | None] = {(8, 16): UNSIGNED, (9, 16): UNSIGNED, (10, 16): None}
    monkeypatch.setattr("llama_engine.model.exact_int8.select_form", lambda *shape: forms[shape[0], shape[1]])
    packer = Int8Packer(2)
    assert packer.describe() == ""
    layers = [packer(random_weight(*shape)) for shape in forms]
    assert [isinstance(layer, ExactInt8Linear) for layer in layers] == [True, True, False]
    assert packer.describe() == (
        "exact INT8, two terms, oneDNN with unsigned 8-bit terms; INT8 weights widened to float32"
    )


def test_verification_leaves_the_number_of_threads_as_it_is() -> None:
    # It computes on one thread, like these tests.
    with threads(3):
        select_form(*SHAPE, 2)
        assert torch.get_num_threads() == 3
