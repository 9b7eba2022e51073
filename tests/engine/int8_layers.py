"""PyTorch's INT8 linear layers on random weights, and what holds for them on every processor.

As a program it checks all of it and prints what the layers are: a test runs it with fewer instructions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from llama_engine.model.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms
from llama_engine.model.onednn_int8 import OneDnnInt8Linear, OneDnnPacker
from llama_engine.model.weights import LinearWeight

# (out, in): the demo checkpoint's kind, odd ones, and one that is wider than any block of a kernel.
SHAPES = [(768, 256), (37, 48), (3, 1), (65, 1031), (130, 5632)]

AUTO = ActivationTerms(6.0)
TERMS = {"one term": ONE_TERM, "auto": AUTO, "two terms": TWO_TERMS}
each_terms = pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())

# Of the largest output of a row; by the bits of a term and the terms.
BOUNDS = {(8, TWO_TERMS): 1e-4, (8, AUTO): 3e-2, (8, ONE_TERM): 3e-2, (7, TWO_TERMS): 4e-4, (7, AUTO): 4e-2,
          (7, ONE_TERM): 4e-2}  # fmt: skip


def random_weight(outputs: int, inputs: int, bias: bool = False) -> LinearWeight:
    """Return a weight whose rows have different scales."""
    random = torch.Generator().manual_seed(outputs * inputs)
    weight = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8, generator=random)
    scales = torch.rand(outputs, generator=random) + 0.1
    return LinearWeight(weight, scales, torch.randn(outputs, generator=random) if bias else None)


def random_rows(rows: int, inputs: int) -> torch.Tensor:
    """Return activations whose rows differ in size by up to 10⁶."""
    random = torch.Generator().manual_seed(rows)
    activations = torch.randn(rows, inputs, generator=random)
    return activations * 10 ** (6 * torch.rand(rows, 1, generator=random) - 3)


def rows_with_outliers(rows: int, inputs: int) -> torch.Tensor:
    """Return random rows of which every third has an outlier."""
    activations = random_rows(rows, inputs)
    activations[::3, inputs // 2] *= 5 * inputs**0.5
    return activations


def in_float64(activations: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """Return the product with the dequantized weight."""
    assert weight.scales is not None
    product: torch.Tensor = activations.double() @ (weight.weight.double() * weight.scales.double()[:, None]).T
    return product if weight.bias is None else product + weight.bias.double()


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest error of any row, relative to the row's largest value."""
    return ((result.double() - expected).abs().amax(-1) / expected.abs().amax(-1)).max().item()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute on this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check_rows_are_independent(layer: OneDnnInt8Linear) -> None:
    """Assert that a row's bits are the same alone, in batches, permuted, and on one or two threads."""
    activations = rows_with_outliers(100, layer.in_features)
    with threads(1):
        together = layer(activations)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    for number in (1, 2):
        with threads(number):
            assert torch.equal(layer(activations), together)
            assert torch.equal(layer(activations[order]), together[order])
            for first, last in ((0, 1), (99, 100), (3, 5), (1, 18), (7, 39), (5, 38), (0, 64), (20, 99)):
                assert torch.equal(layer(activations[first:last]), together[first:last]), (first, last)


def main() -> None:
    """Check layers of all shapes with two terms and of one shape with others; print what they are."""
    for terms, shapes in ((TWO_TERMS, SHAPES), (ONE_TERM, SHAPES[:1]), (AUTO, SHAPES[:1])):
        packer = OneDnnPacker(terms)
        for outputs, inputs in shapes:
            weight = random_weight(outputs, inputs, bias=True)
            layer = packer(weight)
            check_rows_are_independent(layer)
            activations = random_rows(20, inputs)
            error = relative_error(layer(activations), in_float64(activations, weight))
            assert error < BOUNDS[layer.bits, terms], error
        print(packer.describe())


if __name__ == "__main__":
    main()
