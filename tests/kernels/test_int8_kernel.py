"""The fused 8-bit product against its reference; a row has the same bits in every batch."""

from __future__ import annotations

import pytest
import torch
from engine.triton_device import DEVICE, DTYPES, NO_LANGUAGE, assert_near, normal, randomness
from llama_engine.kernels.gpu import gpu_reference

pytest.importorskip("triton", reason=NO_LANGUAGE)
from llama_engine.kernels.gpu.arrival_counters import counters
from llama_engine.kernels.gpu.int8_product import ROW_TILES, Tiles, int8_product, tiles_for


def random_weight(outputs: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an 8-bit weight and its scales."""
    weight = torch.randint(-127, 128, (outputs, inner), device=DEVICE, generator=randomness(1), dtype=torch.int8)
    return weight, torch.rand(outputs, device=DEVICE, generator=randomness(2)) / 127


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("outputs", "inner", "tiles"),
    [
        (64, 128, Tiles()),
        (70, 96, Tiles()),
        (1, 16, Tiles()),
        (130, 400, Tiles(splits=2, inner=64)),
        (64, 256, Tiles(splits=4)),
    ],
    ids=["one tile", "partial tiles", "smallest", "uneven stretches", "empty stretches"],
)
def test_the_fused_product_is_that_of_the_reference(
    outputs: int, inner: int, tiles: Tiles, bias: bool, dtype: torch.dtype
) -> None:
    weight, scales = random_weight(outputs, inner)
    added = normal(outputs, seed=3, dtype=dtype) if bias else None
    for rows in (1, 7, 16, 17, 64, 70):
        activations = normal(rows, inner, seed=rows, dtype=dtype)
        expected = gpu_reference.int8_product(activations, weight, scales, added)
        assert_near(int8_product(activations, weight, scales, added, tiles), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_256_weights_are_widened_exactly(dtype: torch.dtype) -> None:
    weight = torch.arange(-128, 128, device=DEVICE).to(torch.int8).view(16, 16)
    unit = torch.eye(16, device=DEVICE, dtype=dtype)
    product = int8_product(unit, weight, torch.ones(16, device=DEVICE))
    assert torch.equal(product.T.to(torch.int8), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [None, Tiles(splits=2)])
def test_a_row_has_the_same_bits_in_every_batch(tiles: Tiles | None, dtype: torch.dtype) -> None:
    weight, scales = random_weight(70, 512)
    activations = normal(70, 512, seed=4, dtype=dtype)
    if DEVICE.type == "cpu":
        # numpy's dot, the interpreter's, adds up in another order for another width; sums of integers are exact in any.
        # So this shows that rows do not mix; only a GPU can show that the order of sums is the same.
        activations = (8 * activations).round()
    together = int8_product(activations, weight, scales, None, tiles)
    for rows in (1, 2, *ROW_TILES, 17, 33, 65):
        assert torch.equal(int8_product(activations[:rows], weight, scales, None, tiles), together[:rows]), rows
    order = torch.randperm(70, device=DEVICE, generator=randomness(5))
    assert torch.equal(int8_product(activations[order], weight, scales, None, tiles), together[order])


def test_a_row_that_is_not_finite_leaves_the_others_unchanged() -> None:
    weight, scales = random_weight(64, 256)
    activations = normal(5, 256, seed=6)
    clean = int8_product(activations, weight, scales, None, Tiles(splits=2))
    activations[2] = torch.nan
    spoiled = int8_product(activations, weight, scales, None, Tiles(splits=2))
    others = [0, 1, 3, 4]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[2].isnan().all()


def test_activations_may_be_views() -> None:
    weight, scales = random_weight(64, 128)
    wide = normal(6, 300, seed=7)
    tall = normal(128, 6, seed=8)
    for view in (wide[:, 40:168], wide[::2, :128], tall.T):
        expected = int8_product(view.contiguous(), weight, scales)
        assert torch.equal(int8_product(view, weight, scales), expected)


def test_the_sum_does_not_overflow_float16_before_it_is_scaled() -> None:
    weight = torch.full((16, 1024), 127, device=DEVICE, dtype=torch.int8)
    activations = torch.ones(1, 1024, device=DEVICE, dtype=torch.float16)
    scales = torch.full((16,), 1 / 127, device=DEVICE)
    for product in (int8_product, gpu_reference.int8_product):
        assert (product(activations, weight, scales, None) == 1024).all()


def test_the_counters_are_reset_for_the_next_kernel() -> None:
    weight, scales = random_weight(130, 256)
    activations = normal(70, 256, seed=9)
    first = int8_product(activations, weight, scales, None, Tiles(splits=2))
    assert not counters(DEVICE, 1).any()
    assert torch.equal(int8_product(activations, weight, scales, None, Tiles(splits=2)), first)


def test_only_weights_too_small_to_fill_a_gpu_are_split() -> None:
    processors = 132
    assert tiles_for(32_000, 4096, processors).splits == 1
    for outputs, inner in ((4096, 4096), (4096, 11_008), (6144, 4096), (11_008, 4096)):
        tiles = tiles_for(outputs, inner, processors)
        assert outputs // tiles.outputs * tiles.splits >= processors
        assert inner // tiles.inner // tiles.splits >= tiles.stages, "a stretch is shorter than the prefetch pipeline"
    assert tiles_for(16, 16, processors).splits == 1
