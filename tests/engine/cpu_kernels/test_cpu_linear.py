"""INT8 and 4-bit products of every kernel have the reference's bits, whatever is computed beside a token."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from engine.cpu_kernels.models import kernels
from engine.int8_layers import AUTO, random_rows, random_weight, rows_with_outliers
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.kernels.activation_terms import MAX_INPUTS, ONE_TERM, TWO_TERMS, ActivationTerms
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.cpu.instruction_sets import INSTRUCTION_SETS
from llama_engine.kernels.cpu.packing import pack_linear
from llama_engine.kernels.cpu.self_test import run_linear
from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear

GPU = "GPU"
"""A GPU's product, on CPU tensors: of INT8 per channel, with the same number of terms for every token."""
CHANNELS = "per channel"
GROUPED = ("4 bits", "8 bits", "4 bits, offsets, order", "8 bits, offsets, order")

Product = tuple[LinearWeight, torch.Tensor]


def weight(kind: str, outputs: int, inputs: int, size: int = 32) -> LinearWeight:
    """Return a random layer with a bias."""
    if kind == CHANNELS:
        return random_weight(outputs, inputs, bias=True)
    return random_weight(outputs, inputs, True, int(kind[0]), size, "offsets" in kind)


def linear(kernel: str, x: torch.Tensor, layer: LinearWeight, terms: ActivationTerms) -> torch.Tensor:
    """Compute x · Wᵀ + b by an instruction set's kernels, or as a GPU does."""
    if kernel == GPU:
        return exact_int8_linear(layer, 1 if terms == ONE_TERM else 2)(x)
    return run_linear(kernels(kernel), x, layer, terms)


def of_shape(kind: str, outputs: int, inputs: int, size: int = 0) -> Product:
    x = rows_with_outliers(37, inputs)
    # The scale of zeros is a division by zero.
    x[5] = 0
    return weight(kind, outputs, inputs, size), x


def with_largest_sums(kind: str) -> Product:
    """Sums over rows exceed 2³¹: packed weights are up to 255, terms up to 127. They must wrap around."""
    inputs, bound = (MAX_INPUTS, 128) if kind == CHANNELS else (1024, 2 ** (int(kind[0]) - 1))
    layer = weight(kind, 4, inputs, 512)
    layer.weight[0], layer.weight[1], layer.weight[2] = bound - 1, -bound, 0
    layer.weight[3] = torch.where(torch.arange(inputs) % 2 > 0, bound - 1, -bound)
    x = torch.ones(5, inputs)
    x[1], x[2], x[3, 1:] = -1, torch.arange(inputs) % 2 * 2.0 - 1, 126.5 / 127  # high 126, low 127
    x[4] = 0
    return layer, x


def of_size(size: float) -> Product:
    return random_weight(64, 128), rows_with_outliers(6, 128) / 1e5 * size


def of_every_outlier() -> Product:
    """Values around the threshold, and from no outliers to more than are summed in int32."""
    x = random_rows(600, 1024)
    x[:, 100] = x.square().mean(1).sqrt() * torch.linspace(2, 9, 600)
    chance = torch.rand(600, 512, generator=torch.Generator().manual_seed(0))
    x[:, 512:] *= torch.where(chance < torch.linspace(0, 1, 600)[:, None], 30, 1)
    return random_weight(64, 1024), x


def at_the_edge_of_outliers() -> Product:
    """The mean of 63 ones and one 4.2 is a quarter of that: at a ratio of 4 it is no outlier, and a larger one is."""
    x = torch.ones(4, 64)
    x[:, 5] = torch.tensor([4.0, 4.199, 4.201, 4.4])
    q, _ = cpu_reference.quantize(x, AUTO)
    assert (q.abs().amax(1) > 127).tolist() == [False, False, True, True]
    return random_weight(64, 64), x


CHANNEL_SHAPES = [(64, 64), (1, 1), (96, 1024), (40, 5632), (17, 11009)]
GROUP_SHAPES = [(64, 64, 32), (40, 288, 96), (1, 320, 64), (96, 1024, 128), (40, 1536, 512)]
FEW = [
    partial(of_shape, CHANNELS, 33, 100),
    partial(of_shape, GROUPED[0], 33, 96, 32),
    partial(of_shape, GROUPED[3], 17, 5632, 128),
]
"""Products that are also computed with one or two terms for every token."""
PRODUCTS = [
    *FEW,
    *[partial(of_shape, CHANNELS, *shape) for shape in CHANNEL_SHAPES],
    *[partial(of_shape, kind, *shape) for kind, shape in zip(cycle(GROUPED), GROUP_SHAPES, strict=False)],
    *[partial(with_largest_sums, kind) for kind in (CHANNELS, *GROUPED[2:])],
    *[partial(of_size, size) for size in (0.0, 1e-42, 1e-37, 1e37)],
    of_every_outlier,
    at_the_edge_of_outliers,
]
ON_A_GPU = [partial(of_shape, CHANNELS, *shape) for shape in CHANNEL_SHAPES if shape[1] % 4 == 0]


@pytest.mark.parametrize(
    ("kernel", "terms", "case"),
    [
        *product(INSTRUCTION_SETS, [AUTO], PRODUCTS),
        *product(INSTRUCTION_SETS, [ONE_TERM, TWO_TERMS], FEW),
        *product([GPU], [ONE_TERM, TWO_TERMS], ON_A_GPU),
    ],
)
def test_a_product_has_the_bits_of_the_reference(
    kernel: str, terms: ActivationTerms, case: Callable[[], Product]
) -> None:
    layer, x = case()
    assert torch.equal(linear(kernel, x, layer, terms), cpu_reference.linear(x, layer, terms))


@pytest.mark.parametrize(
    ("kernel", "kind", "terms"),
    [*product(INSTRUCTION_SETS, [CHANNELS, GROUPED[2]], [AUTO]), *product([GPU], [CHANNELS], [ONE_TERM, TWO_TERMS])],
)
def test_a_row_that_is_not_finite_gives_nan_in_its_own_row_alone(
    kernel: str, kind: str, terms: ActivationTerms
) -> None:
    layer, x = weight(kind, 64, 128), rows_with_outliers(9, 128)
    expected = linear(kernel, x, layer, terms)
    others = [row for row in range(9) if row != 4]
    for value in (torch.nan, torch.inf, -torch.inf):
        x[4, 77] = value
        result = linear(kernel, x, layer, terms)
        assert result[4].isnan().all()
        assert torch.equal(result[others], expected[others])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LinearWeight(torch.zeros(2, 2)), r"torch\.float32, and the CPU kernels take int8"),
        *[
            (LinearWeight(torch.zeros(2, 1536, dtype=torch.int8), torch.ones(2, count)),
             f"1536 columns has {count} groups, and the CPU kernels take groups of a mul")
            for count in (1, 7, 64, 96)
        ],
        (replace(weight(GROUPED[2], 64, 64), order=torch.arange(64).clamp(max=62)),
         "the order of a weight's 64 columns isn't a permutation"),
    ],
)  # fmt: skip
def test_weights_that_kernels_cannot_take_are_refused(layer: LinearWeight, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_linear(kernels("avx2"), layer)
