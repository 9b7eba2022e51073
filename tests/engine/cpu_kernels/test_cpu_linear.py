"""The integer product of the CPU kernels gives the bits of the int64 product."""

import pytest
import torch
from engine.cpu_kernels.models import kernels
from engine.int8_layers import AUTO, each_terms, random_rows, random_weight, rows_with_outliers, threads
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.kernels.activation_terms import ActivationTerms
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.build import INSTRUCTION_SETS
from llama_engine.kernels.cpu.packing import MAX_INPUTS, pack_linear
from llama_engine.kernels.cpu.self_test import run_linear


@each_terms
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 64), (1, 1), (33, 100), (96, 1024), (40, 5632), (17, 11009)])
def test_a_product_has_the_bits_of_the_int64_product(
    name: str, outputs: int, inputs: int, terms: ActivationTerms
) -> None:
    layer, x = random_weight(outputs, inputs, bias=True), rows_with_outliers(37, inputs)
    assert torch.equal(run_linear(kernels(name), x, layer, terms), cpu_reference.linear(x, layer, terms))


@each_terms
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_largest_sums_are_exact(name: str, terms: ActivationTerms) -> None:
    # The packed weights, up to 255, and the terms, up to 127, have sums beyond 2³¹ here, which must wrap around.
    inputs = MAX_INPUTS
    assert inputs * 255 * 127 > 2**31
    layer = LinearWeight(torch.full((3, inputs), 127, dtype=torch.int8), torch.ones(3))
    layer.weight[1], layer.weight[2] = -128, torch.arange(inputs) % 2 * 254 - 127
    x = torch.ones(4, inputs)
    x[1], x[2] = -1, torch.arange(inputs) % 2 * 2.0 - 1
    x[3, 1:] = 126.5 / 127  # high 126, low 127
    assert torch.equal(run_linear(kernels(name), x, layer, terms), cpu_reference.linear(x, layer, terms))


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(name: str) -> None:
    layer, x = random_weight(80, 200), rows_with_outliers(99, 200)
    together = run_linear(kernels(name), x, layer, AUTO)
    for rows in (1, 2, 3, 5, 6, 7, 13, 64, 97):
        for count in (1, 2):
            with threads(count):
                assert torch.equal(run_linear(kernels(name), x[99 - rows :], layer, AUTO), together[99 - rows :])


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_gives_nan_in_its_own_row_alone(name: str, value: float) -> None:
    layer, x = random_weight(64, 128), rows_with_outliers(9, 128)
    expected = run_linear(kernels(name), x, layer, AUTO)
    x[4, 77] = value
    result = run_linear(kernels(name), x, layer, AUTO)
    assert result[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(result[others], expected[others])


@each_terms
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-37, 1e37])
def test_rows_of_any_size_are_quantized(name: str, size: float, terms: ActivationTerms) -> None:
    layer, x = random_weight(64, 128), rows_with_outliers(6, 128) / 1e5 * size
    result, expected = run_linear(kernels(name), x, layer, terms), cpu_reference.linear(x, layer, terms)
    assert torch.equal(result, expected)


def test_float_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"torch\.float32, and the CPU kernels take int8"):
        pack_linear(kernels("avx2"), LinearWeight(torch.zeros(2, 2)))


@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_rows_at_the_edge_of_the_rule_have_the_references_terms(name: str) -> None:
    """With 72 inputs and a ratio of 6 a row has two terms if its sum of squares is below 2 · 127²."""
    highs = torch.zeros(6, 72)
    highs[:, 0] = 127
    # Sums of squares: just below, at and just above the edge; a single value; then zeros, and a row that isn't finite.
    highs[0, 1:3], highs[1, 1], highs[2, 1:3] = torch.tensor([126, 15]), 127, torch.tensor([127, 1])
    x = highs * 0.37
    x[:, 40:] += 0.1  # below half of a high term
    x[4], x[5, 3] = 0, torch.nan
    layer = random_weight(64, 72)
    q, _ = cpu_reference.quantize(x, AUTO)
    assert (q.abs().amax(1) > 127).tolist() == [True, False, False, True, False, False]
    result, expected = run_linear(kernels(name), x, layer, AUTO), cpu_reference.linear(x, layer, AUTO)
    assert torch.equal(result[:5], expected[:5])
    assert result[5].isnan().all()


def test_rows_of_every_crest_factor_have_the_same_bits_everywhere() -> None:
    layer, x = random_weight(64, 1024), random_rows(600, 1024)
    x[:, 100] = x.square().mean(1).sqrt() * torch.linspace(3, 9, 600)
    expected = cpu_reference.linear(x, layer, AUTO)
    for name in INSTRUCTION_SETS:
        assert torch.equal(run_linear(kernels(name), x, layer, AUTO), expected)
