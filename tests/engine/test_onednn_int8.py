"""PyTorch's exact INT8 product: exact sums, independent rows, bounded errors, and the trial that chooses its terms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from engine import int8_layers
from engine.int8_layers import (
    AUTO,
    BOUNDS,
    SHAPES,
    TERMS,
    check_rows_are_independent,
    each_terms,
    in_float64,
    random_rows,
    random_weight,
    rows_with_outliers,
)
from llama_engine.errors import CheckpointError
from llama_engine.kernels.cpu.instruction_sets import cpu_flags
from llama_engine.model import onednn_int8
from llama_engine.model.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms
from llama_engine.model.onednn_int8 import (
    MAX_INPUTS,
    IntegerProduct,
    OneDnnInt8Linear,
    OneDnnPacker,
    quantize,
    refusal,
    term_bits,
)

BITS = [bits for bits in (8, 7) if refusal(256, 256, bits) is None]
"""On a processor without VNNI products of 8-bit terms saturate."""
ROOT = Path(__file__).parents[2]
FEWER = [("AVX2", "avx2"), *([("AVX512_CORE", "avx512")] if "avx512f" in cpu_flags() else [])]
"""Values of ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY; torch takes the second's word for what the processor has."""

Fault = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 33, 100])
def test_the_sums_are_those_of_int64(outputs: int, inputs: int, terms: int, rows: int) -> None:
    weight, bits = random_weight(outputs, inputs), term_bits()
    stack, _ = quantize(random_rows(rows, inputs), terms, bits)
    # With scales of 1 the product is the sum, rounded to float32.
    sums = IntegerProduct(weight.weight, torch.ones(outputs), bits)(stack)
    exact = (stack.long() - (1 << (bits - 1))) @ weight.weight.long().T
    # Behind the rows the stack has any bytes, whose sums may saturate.
    assert torch.equal(sums[:, :rows], exact.float()[:, :rows])


@pytest.mark.parametrize("value", [127, -127])
def test_the_largest_sums_that_int32_holds_are_exact(value: int) -> None:
    weight, bits = torch.full((17, MAX_INPUTS), value, dtype=torch.int8), term_bits()
    largest = (1 << (bits - 1)) - 1
    stack = torch.full((2, 1, MAX_INPUTS), (1 << bits) - 1, dtype=torch.uint8)
    exact = torch.full((2, 1, 17), largest * value * MAX_INPUTS).float()
    assert torch.equal(IntegerProduct(weight, torch.ones(17), bits)(stack), exact)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@each_terms
def test_a_row_has_the_same_bits_in_any_batch(outputs: int, inputs: int, terms: ActivationTerms) -> None:
    check_rows_are_independent(OneDnnPacker(terms)(random_weight(outputs, inputs, bias=True)))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("bits", BITS)
@each_terms
def test_the_error_is_bounded_by_the_bits_of_the_terms(
    outputs: int, inputs: int, bits: int, terms: ActivationTerms
) -> None:
    weight = random_weight(outputs, inputs, bias=True)
    activations = random_rows(64, inputs)
    result = OneDnnInt8Linear(weight, terms, bits)(activations)
    assert int8_layers.relative_error(result, in_float64(activations, weight)) < BOUNDS[bits, terms]


@pytest.mark.parametrize("bits", BITS)
def test_rows_with_outliers_have_two_terms_and_others_one(bits: int) -> None:
    weight, activations = random_weight(130, 1024, bias=True), rows_with_outliers(40, 1024)
    auto, one, two = (OneDnnInt8Linear(weight, terms, bits)(activations) for terms in (AUTO, ONE_TERM, TWO_TERMS))
    outliers = torch.arange(40) % 3 == 0
    assert torch.equal(auto, torch.where(outliers[:, None], two, one))
    assert not torch.equal(one[outliers], two[outliers])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (2, 1), (3, 40), (0,)])
def test_the_result_is_of_the_activations_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer, activations = OneDnnPacker(AUTO)(random_weight(37, 48, bias=True)), torch.randn(*shape, 48).to(dtype)
    result = layer(activations)
    assert (result.shape, result.dtype, result.is_contiguous()) == ((*shape, 37), dtype, True)
    assert torch.equal(result, layer(activations.float()).to(dtype))
    # Of a view whose rows aren't next to each other, too.
    assert torch.equal(layer(activations.mT.contiguous().mT) if len(shape) > 1 else result, result)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@each_terms
def test_a_row_that_is_not_finite_changes_no_other(bad: float, terms: ActivationTerms) -> None:
    layer, activations = OneDnnPacker(terms)(random_weight(37, 48, bias=True)), rows_with_outliers(40, 48)
    expected = layer(activations)
    activations[[3, 39], [0, 47]] = bad
    result = layer(activations)
    assert result[[3, 39]].isnan().all()
    others = [row for row in range(40) if row not in (3, 39)]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_rows_of_any_size_keep_their_relative_error(size: float) -> None:
    weight, activations = random_weight(37, 48), torch.randn(5, 48) * size
    result = OneDnnPacker(TWO_TERMS)(weight)(activations)
    assert int8_layers.relative_error(result, in_float64(activations, weight)) < BOUNDS[7, TWO_TERMS]


def test_a_layer_keeps_no_reference_to_the_original_weight() -> None:
    weight = random_weight(768, 256)
    original = weakref.ref(weight.weight)
    layer = OneDnnPacker(AUTO)(weight)
    activations = random_rows(3, 256)
    before = layer(activations)
    del weight
    assert original() is None
    assert torch.equal(layer(activations), before)


@pytest.mark.long
@pytest.mark.parametrize(("onednn", "aten"), FEWER)
def test_with_fewer_instructions_the_layers_are_exact(onednn: str, aten: str) -> None:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / path) for path in ("model_repository/llama/1", "tests"))
    command = [sys.executable, "-m", "engine.int8_layers"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert "exact INT8, two terms, oneDNN with 7-bit terms" in run.stdout


@pytest.fixture
def new_process() -> Iterator[None]:
    """Forget the trials of this process, before and after a test."""
    for cache in (term_bits, refusal):
        cache.cache_clear()
    yield
    for cache in (term_bits, refusal):
        cache.cache_clear()


def _break(monkeypatch: pytest.MonkeyPatch, fault: Fault, bits: tuple[int, ...], outputs: int | None = None) -> None:
    """Compute products in float64, so that the processor plays no part, and those of these terms wrongly.

    outputs: of the weights whose products are wrong; None for all.
    """

    class Product(IntegerProduct):
        def __init__(self, weight: torch.Tensor, scales: torch.Tensor, term_bits: int) -> None:
            self._weight, self._scales, self._bits = weight.double(), scales, term_bits

        def __call__(self, terms: torch.Tensor) -> torch.Tensor:
            sums = ((terms.double() - (1 << (self._bits - 1))) @ self._weight.T).float() * self._scales
            return fault(sums) if self._bits in bits and outputs in (None, len(self._weight)) else sums

    monkeypatch.setattr(onednn_int8, "IntegerProduct", Product)


def _off_by_one(sums: torch.Tensor) -> torch.Tensor:
    sums[-1, -1] = sums[-1, -1].nextafter(torch.tensor(torch.inf))
    return sums


def _raise(sums: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(f"no product of {tuple(sums.shape)}")


FAULTS: dict[str, Fault] = {
    r"sums of 1 rows are wrong by \d+\.\d% of the largest": lambda sums: sums.clamp(-1000, 1000),
    r"sums of 1 rows are wrong by 0\.0% of the largest": _off_by_one,
    "sums of 1 rows are wrong by nan%": lambda sums: sums * torch.nan,
    "the product fails: NotImplementedError: no product of": _raise,
}


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("reason", FAULTS)
def test_terms_have_7_bits_where_8_are_not_exact(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _break(monkeypatch, FAULTS[reason], (8,))
    assert [OneDnnPacker(terms).describe() for terms in TERMS.values()] == [
        "exact INT8, one term, oneDNN with 7-bit terms",
        "exact INT8, two terms for outlier rows (ratio 6), oneDNN with 7-bit terms",
        "exact INT8, two terms, oneDNN with 7-bit terms",
    ]
    (message,) = caplog.messages
    assert re.match(rf"oneDNN's INT8 products have 7-bit terms, with 8 bits {reason}", message)


@pytest.mark.usefixtures("new_process")
@pytest.mark.parametrize("reason", FAULTS)
def test_a_shape_without_an_exact_product_is_refused(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _break(monkeypatch, FAULTS[reason], (7, 8), outputs=40)
    packer = OneDnnPacker(AUTO)
    assert packer(random_weight(41, 96)).in_features == 96
    with pytest.raises(
        CheckpointError,
        match=rf"INT8 weights of 40 x 96 \(outputs x inputs\) have no exact product on this CPU: with oneDNN {reason}",
    ):
        packer(random_weight(40, 96))


def test_a_layer_of_more_inputs_than_int32_can_sum_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"8 x 65794 .* sums of more than 65793 inputs leave int32"):
        OneDnnPacker(AUTO)(random_weight(8, MAX_INPUTS + 1))
