"""Random INT8 weights and activations of linear layers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.kernels.activation_terms import ActivationTerms

AUTO = ActivationTerms(4.0)


def random_weight(
    outputs: int,
    inputs: int,
    bias: bool = False,
    bits: int = 8,
    group: int | None = None,
    general: bool = False,
    generator: torch.Generator | None = None,
) -> LinearWeight:
    """Return a layer whose outputs are about as large as its inputs.

    group: the columns of a group; None is a scale per channel. general: with offsets and an order.
    """
    generator = generator or torch.Generator().manual_seed(outputs * inputs)
    bound = 2 ** (bits - 1)
    lowest = 1 - bound if group is None else -bound
    weight = torch.randint(lowest, bound, (outputs, inputs), dtype=torch.int8, generator=generator)
    shape = (outputs,) if group is None else (outputs, inputs // group)
    scales = (torch.rand(shape, generator=generator) + 0.5) / bound * 1.7 * inputs**-0.5
    offsets = scales * torch.randn(shape, generator=generator) if general else None
    order = torch.randperm(inputs, generator=generator) if general else None
    biases = torch.randn(outputs, generator=generator) if bias else None
    return LinearWeight(weight, scales, biases, offsets, bits, order)


def random_rows(rows: int, inputs: int) -> torch.Tensor:
    """Return activations whose rows differ in size by up to 10⁶."""
    random = torch.Generator().manual_seed(rows)
    activations = torch.randn(rows, inputs, generator=random)
    return activations * 10 ** (6 * torch.rand(rows, 1, generator=random) - 3)


def rows_with_outliers(rows: int, inputs: int) -> torch.Tensor:
    """Return random rows: some have no outlier, some one, some many."""
    activations = random_rows(rows, inputs)
    activations[::3, inputs // 2] *= 5 * inputs**0.5
    activations[1::3, :: inputs // 7 + 1] *= 40
    activations[3::6] = activations[3::6].sign()
    return activations


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute on this number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
