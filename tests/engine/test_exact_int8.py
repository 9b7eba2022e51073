"""Exact INT8 layers on a CPU: sums of integers, independent rows, bounded errors, one copy of the weights."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from engine import int8_layers
from engine.int8_layers import BOUNDS, SHAPES, check_rows_are_independent, in_float64, random_rows, random_weight
from llama_engine.kernels.cpu.instruction_sets import cpu_flags
from llama_engine.model.exact_int8 import ExactInt8Linear, Int8Packer
from llama_engine.model.int8_selection import refusal
from llama_engine.model.integer_product import MAX_INPUTS, NARROW, SIGNED, UNSIGNED, Form, IntegerProduct
from llama_engine.model.weights import LinearWeight

FORMS = [form for form in (UNSIGNED, NARROW) if refusal(form, 256, 256, 2) is None]
"""On a processor without VNNI products of 8-bit terms saturate."""
ROOT = Path(__file__).parents[2]
FEWER = [("AVX2", "avx2"), *([("AVX512_CORE", "avx512")] if "avx512f" in cpu_flags() else [])]
"""Values of ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY; torch takes the second's word for what the processor has."""


def _layer(weight: LinearWeight, terms: int) -> ExactInt8Linear:
    layer = Int8Packer(terms)(weight)
    assert isinstance(layer, ExactInt8Linear)
    return layer


def _integers(stack: torch.Tensor, form: Form, rows: int) -> torch.Tensor:
    """Return q, int64, of a stack of terms."""
    terms = stack[:, :rows].long() - form.zero_point
    return terms[0] if len(terms) == 1 else (terms[0] << form.bits) + terms[1]


@pytest.mark.parametrize("form", [SIGNED, UNSIGNED, NARROW], ids=str)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("rows", [1, 7, 33])
def test_the_terms_of_a_row_are_its_values_rounded_to_the_nearest_step(form: Form, terms: int, rows: int) -> None:
    activations = random_rows(rows, 211)
    stack, scales = form.split(activations, terms)
    assert stack.dtype == (torch.int8 if form.signed else torch.uint8)
    assert int(stack[:, :rows].max()) < 1 << (form.bits - form.signed)
    integers = _integers(stack, form, rows)
    assert (integers * scales.double() - activations.double()).abs().amax(1).le(scales.double()[:, 0] * 0.51).all()
    # The whole range is used, so that a row has 7, 14, 6 or 13 bits and a sign.
    steps = {(8, 1): 127, (8, 2): 32639, (7, 1): 63, (7, 2): 8127}
    assert set(integers.abs().amax(1).tolist()) == {steps[form.bits, terms]}


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 5, 32, 33, 100])
def test_the_sums_are_those_of_int64(outputs: int, inputs: int, terms: int, rows: int) -> None:
    weight = random_weight(outputs, inputs)
    form = _layer(weight, terms).form
    stack, _ = form.split(random_rows(rows, inputs), terms)
    # With scales of 1 the product is the sum, rounded to float32.
    sums = IntegerProduct(weight.weight, torch.ones(outputs), form)(stack)
    exact = (stack.long() - form.zero_point) @ weight.weight.long().T
    # Behind the rows the stack has any bytes, whose sums may saturate.
    assert torch.equal(sums[:, :rows], exact.float()[:, :rows])


@pytest.mark.parametrize("value", [127, -127])
def test_the_largest_sums_that_int32_holds_are_exact(value: int) -> None:
    weight = torch.full((17, MAX_INPUTS), value, dtype=torch.int8)
    form = _layer(LinearWeight(weight, torch.ones(17)), 2).form
    stack = torch.full((2, 1, MAX_INPUTS), form.zero_point + (1 << (form.bits - 1)) - 1).to(
        torch.int8 if form.signed else torch.uint8
    )
    exact = (stack.long() - form.zero_point) @ weight.long().T
    assert torch.equal(IntegerProduct(weight, torch.ones(17), form)(stack), exact.float())


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("terms", [1, 2])
def test_a_row_has_the_same_bits_alone_in_any_batch_in_any_order_and_on_any_number_of_threads(
    outputs: int, inputs: int, terms: int
) -> None:
    check_rows_are_independent(_layer(random_weight(outputs, inputs, bias=True), terms))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("terms", [1, 2])
def test_the_error_of_a_product_is_bounded_by_the_bits_of_its_terms(
    outputs: int, inputs: int, form: Form, terms: int
) -> None:
    weight = random_weight(outputs, inputs, bias=True)
    activations = random_rows(64, inputs)
    result = ExactInt8Linear(weight, form, terms)(activations)
    assert int8_layers.relative_error(result, in_float64(activations, weight)) < BOUNDS[form.bits, terms]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (2, 1), (3, 40), (0,)])
def test_the_result_has_the_shape_and_the_dtype_of_the_activations(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    weight = random_weight(37, 48, bias=True)
    layer, activations = _layer(weight, 2), torch.randn(*shape, 48).to(dtype)
    result = layer(activations)
    assert (result.shape, result.dtype, result.is_contiguous()) == ((*shape, 37), dtype, True)
    assert torch.equal(result, layer(activations.float()).to(dtype))
    # Of a view whose rows aren't next to each other, too.
    assert torch.equal(layer(activations.mT.contiguous().mT) if len(shape) > 1 else result, result)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_row_that_is_not_finite_is_nan_and_changes_no_other(bad: float, terms: int) -> None:
    layer, activations = _layer(random_weight(37, 48, bias=True), terms), random_rows(40, 48)
    expected = layer(activations)
    activations[[3, 39], [0, 47]] = bad
    result = layer(activations)
    assert result[[3, 39]].isnan().all()
    others = [row for row in range(40) if row not in (3, 39)]
    assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-31])
@pytest.mark.parametrize("terms", [1, 2])
def test_a_row_of_zeros_or_almost_gives_the_bias(value: float, terms: int) -> None:
    weight = random_weight(37, 48, bias=True)
    assert weight.bias is not None
    torch.testing.assert_close(_layer(weight, terms)(torch.full((1, 48), value))[0], weight.bias, rtol=0, atol=1e-28)


@pytest.mark.parametrize("size", [1e-25, 1e25])
def test_rows_of_any_size_keep_their_relative_error(size: float) -> None:
    weight, activations = random_weight(37, 48), torch.randn(5, 48) * size
    assert int8_layers.relative_error(_layer(weight, 2)(activations), in_float64(activations, weight)) < BOUNDS[7, 2]


def test_a_layer_keeps_no_reference_to_the_original_weight() -> None:
    weight = random_weight(768, 256)
    original = weakref.ref(weight.weight)
    layer = _layer(weight, 2)
    activations = random_rows(3, 256)
    before = layer(activations)
    del weight
    assert original() is None
    assert torch.equal(layer(activations), before)


GROWTH = """
import ctypes
import os
import torch
from llama_engine.model.exact_int8 import Int8Packer
from llama_engine.model.weights import LinearWeight

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def layer():
    return packer(LinearWeight(torch.ones(4096, 4096, dtype=torch.int8), torch.ones(4096)))

packer = Int8Packer(2)
layers = [layer()]
before = resident()
layers += [layer() for _ in range(8)]
ctypes.CDLL(None).malloc_trim(0)
print((resident() - before) / (8 * 4096 * 4096))
"""


def test_packed_weights_take_one_byte_each() -> None:
    """In a process of its own: freed memory of other tests would be used first."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", GROWTH]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    assert 0.8 < float(run.stdout) < 1.1


def test_the_number_of_terms_is_one_or_two() -> None:
    with pytest.raises(ValueError, match="terms is 3, not 1 or 2"):
        Int8Packer(3)


@pytest.mark.long
@pytest.mark.parametrize(("onednn", "aten"), FEWER)
def test_with_fewer_instructions_rows_stay_independent_and_errors_bounded(onednn: str, aten: str) -> None:
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": aten}
    environment["PYTHONPATH"] = os.pathsep.join(str(ROOT / path) for path in ("model_repository/llama/1", "tests"))
    command = [sys.executable, "-m", "engine.int8_layers"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    assert "exact INT8, two terms, oneDNN with unsigned 7-bit terms" in run.stdout
