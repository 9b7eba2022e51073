"""The fused 8-bit product against the plain one, and that a row doesn't know who shares the batch."""

from __future__ import annotations

import pytest
import torch
from engine.gpu_kernels import DEVICE, DTYPES, NO_LANGUAGE, assert_near, normal, randomness
from llama_engine.kernels import reference

pytest.importorskip("triton", reason=NO_LANGUAGE)
from llama_engine.kernels.arrival_counters import counters
from llama_engine.kernels.int8_product import ROW_TILES, Tiles, int8_product, tiles_for


def _weight(outputs: int, inner: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a weight and its scales."""
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
    ids=["one tile", "cut short both ways", "least", "uneven stretches", "stretches of nothing"],
)
def test_the_fused_product_is_not_the_plain_one(
    outputs: int, inner: int, tiles: Tiles, bias: bool, dtype: torch.dtype
) -> None:
    weight, scales = _weight(outputs, inner)
    added = normal(outputs, seed=3, dtype=dtype) if bias else None
    for rows in (1, 7, 16, 17, 64, 70):
        activations = normal(rows, inner, seed=rows, dtype=dtype)
        expected = reference.int8_product(activations, weight, scales, added)
        assert_near(int8_product(activations, weight, scales, added, tiles), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_not_what_its_eight_bits_say(dtype: torch.dtype) -> None:
    weight = torch.arange(-128, 128, device=DEVICE).to(torch.int8).view(16, 16)
    unit = torch.eye(16, device=DEVICE, dtype=dtype)
    product = int8_product(unit, weight, torch.ones(16, device=DEVICE))
    assert torch.equal(product.T.to(torch.int8), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", [None, Tiles(splits=2)])
def test_a_row_depends_on_who_shares_the_batch(tiles: Tiles | None, dtype: torch.dtype) -> None:
    weight, scales = _weight(70, 512)
    activations = normal(70, 512, seed=4, dtype=dtype)
    if DEVICE.type == "cpu":
        # The interpreter's dot is numpy's, which adds up in another order for another width; sums of whole numbers are
        # exact in any. So that rows don't mix can be seen here, but that the order stays the same only on a GPU.
        activations = (8 * activations).round()
    together = int8_product(activations, weight, scales, None, tiles)
    for rows in (1, 2, *ROW_TILES, 17, 33, 65):
        assert torch.equal(int8_product(activations[:rows], weight, scales, None, tiles), together[:rows]), rows
    order = torch.randperm(70, device=DEVICE, generator=randomness(5))
    assert torch.equal(int8_product(activations[order], weight, scales, None, tiles), together[order])


def test_a_row_that_is_not_finite_spoils_the_others() -> None:
    weight, scales = _weight(64, 256)
    activations = normal(5, 256, seed=6)
    clean = int8_product(activations, weight, scales, None, Tiles(splits=2))
    activations[2] = torch.nan
    spoiled = int8_product(activations, weight, scales, None, Tiles(splits=2))
    others = [0, 1, 3, 4]
    assert torch.equal(spoiled[others], clean[others])
    assert spoiled[2].isnan().all()


def test_activations_that_are_views_are_read_wrongly() -> None:
    weight, scales = _weight(64, 128)
    wide = normal(6, 300, seed=7)
    tall = normal(128, 6, seed=8)
    for view in (wide[:, 40:168], wide[::2, :128], tall.T):
        expected = int8_product(view.contiguous(), weight, scales)
        assert torch.equal(int8_product(view, weight, scales), expected)


def test_the_sum_overflows_before_it_is_scaled() -> None:
    weight = torch.full((16, 1024), 127, device=DEVICE, dtype=torch.int8)
    activations = torch.ones(1, 1024, device=DEVICE, dtype=torch.float16)
    scales = torch.full((16,), 1 / 127, device=DEVICE)
    for product in (int8_product, reference.int8_product):
        assert (product(activations, weight, scales, None) == 1024).all()


def test_the_counters_are_not_left_as_they_were_found() -> None:
    weight, scales = _weight(130, 256)
    activations = normal(70, 256, seed=9)
    first = int8_product(activations, weight, scales, None, Tiles(splits=2))
    assert not counters(DEVICE, 1).any()
    assert torch.equal(int8_product(activations, weight, scales, None, Tiles(splits=2)), first)


def test_a_large_weight_is_split_or_a_small_one_leaves_a_gpu_idle() -> None:
    processors = 132
    assert tiles_for(32_000, 4096, processors).splits == 1
    for outputs, inner in ((4096, 4096), (4096, 11_008), (6144, 4096), (11_008, 4096)):
        tiles = tiles_for(outputs, inner, processors)
        assert outputs // tiles.outputs * tiles.splits >= processors
        assert inner // tiles.inner // tiles.splits >= tiles.stages, "a stretch is shorter than its pipeline"
    assert tiles_for(16, 16, processors).splits == 1
