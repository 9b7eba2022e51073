"""Random INT8 weights and activations of linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.kernels.activation_terms import ONE_TERM, TWO_TERMS, ActivationTerms

AUTO = ActivationTerms(6.0)
TERMS = {"one term": ONE_TERM, "auto": AUTO, "two terms": TWO_TERMS}
each_terms = pytest.mark.parametrize("terms", TERMS.values(), ids=TERMS.keys())


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
