"""The compared products: one weight, an error for each, and a failure that is a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from perf.gpu import products
from perf.gpu.options import TINY
from perf.gpu.products import Matrix, Weight
from perf.roofline.rates import DeviceRates

CPU = torch.device("cpu")
RATES = DeviceRates("cpu", 1, {1: 1e9}, {"fp32": 1e9})


def test_every_distinct_matrix_of_the_decoder_is_measured_once() -> None:
    found = [(matrix.outputs, matrix.inputs) for matrix in Matrix.of(TINY)]
    assert found == [(64, 64), (32, 64), (128, 64), (64, 128)]


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_all_products_compute_the_same_matrix_product(rows: int) -> None:
    weight = Weight(Matrix("any", 48, 64), CPU, 0)
    activations = torch.randn(rows, 64)
    exact = activations.double() @ (weight.codes.double() * weight.scales.double()[:, None]).T
    ways = dict(products.ways(weight))
    del ways["int_mm"], ways["fused"]
    for name, product in ways.items():
        error = float((product(activations).double() - exact).norm() / exact.norm())
        assert error < 0.02, name
        # Only those that round the activations have more than the rounding of floats.
        assert (error > 1e-4) == (name in ("bitsandbytes", "bitsandbytes_6", "w8a8")), name


def test_a_failing_product_is_a_result_beside_the_others() -> None:
    found: dict[str, Any] = products.measure(Matrix("any", 48, 64), 4, CPU, RATES, 0.001, products.ways)
    assert found["ways"]["fused"] == {"failed": "RuntimeError: needs CUDA"}
    assert all(way["eager_us"] > 0 for name, way in found["ways"].items() if name != "fused")
    assert found["ways"]["fp32"]["graph_us"] is None
    assert found["ways"]["fp32"]["uncaptured"] == "needs CUDA"
    assert found["fastest"] not in (None, "fused", "int_mm")
    assert found["bandwidth_us"] == {"int8": pytest.approx(3.07, abs=0.01), "fp16": pytest.approx(6.14, abs=0.01)}
