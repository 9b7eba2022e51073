"""The 8-bit product on a GPU, fused: weights are widened inside the matrix product, in registers, just before use.

Device memory is read at one byte a weight, and the widened weight never exists anywhere else. The contract is that of
`reference.int8_product`. Written in the Triton language, which is imported here: import this module only where a
GPU is (`kernels` does), or in Triton's interpreter.

**Why a row's result doesn't depend on the other rows.** One output is a sum over `in`. It is added up in an order that
the shape of the weight alone decides: the inner dimension is cut into SPLITS stretches, a stretch into blocks of INNER,
a block into the 16-wide steps of the tensor cores; the sum of a stretch lies in one float32 accumulator, and the
stretches are added first to last by whichever program is the last one to arrive. The number of rows decides only how
wide the tile is across that direction (ROW_TILES) and how many tiles there are. The weight is the left operand, so that
the rows are the narrow side of the tensor cores' instruction and not its 64-wide one: one row costs a tile of 16.
That the instruction adds up alike whatever its width is nowhere promised; `kernels` tries it on the GPU at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from llama_engine.kernels.arrival_counters import counters

ROW_TILES = (16, 32, 64)
"""Rows that a program computes together; more rows than the last one are several tiles. None of 8: for Hopper it would
be compiled to another matrix instruction (mma instead of wgmma, by Triton 3.7), which need not add up alike."""


@dataclass(frozen=True)
class Tiles:
    """How a weight is cut. A function of its shape and of the GPU, never of the rows: the order of sums hangs on it.

    outputs, inner: of the weight that a program widens at a time, [outputs, inner]. splits: programs that share the
    inner dimension. stages: blocks on their way from memory at once. warps: of a program; 4 are what Hopper's matrix
    instructions want.
    """

    outputs: int = 64
    inner: int = 128
    splits: int = 1
    stages: int = 4
    warps: int = 4


def tiles_for(outputs: int, inner: int, processors: int) -> Tiles:
    """Return how to cut a weight of [outputs, inner] for a GPU of so many multiprocessors.

    Reading memory at its full rate takes some programs a multiprocessor, so a weight with too few rows of tiles for
    that is split along its inner dimension, as long as a stretch keeps a pipeline's worth of blocks.
    """
    tiles = Tiles()
    rows_of_tiles, blocks = triton.cdiv(outputs, tiles.outputs), triton.cdiv(inner, tiles.inner)
    splits = 1
    while 2 * rows_of_tiles * splits < 3 * processors and blocks >= 2 * splits * tiles.stages:
        splits *= 2
    return replace(tiles, splits=splits)


def int8_product(
    activations: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Return [rows, out] as `reference.int8_product` does; any number of rows, meant for a decode step's.

    activations: [rows, in], float16 or bfloat16, each row contiguous (copied if not). weight: [out, in], contiguous.
    tiles: how to cut it; other tiles are another order of sums. Not for two streams at once: programs that share an
    output meet at counters that belong to the device.
    """
    rows, inner = activations.shape
    outputs = weight.shape[0]
    assert weight.shape[1] == inner, f"{inner} activations a row for a weight of {weight.shape[1]}"
    assert weight.dtype == torch.int8, f"the weight is {weight.dtype}"
    assert weight.is_contiguous(), "the weight's rows don't lie side by side"
    assert activations.dtype in (torch.float16, torch.bfloat16), "the tensor cores' products want 16 bits"
    if activations.stride(1) != 1:
        activations = activations.contiguous()
    device = activations.device
    tiles = tiles or tiles_for(outputs, inner, _processors(device))
    row_tile = next((tile for tile in ROW_TILES if rows <= tile), ROW_TILES[-1])
    grid = (triton.cdiv(outputs, tiles.outputs), tiles.splits, triton.cdiv(rows, row_tile))
    product = activations.new_empty(rows, outputs)
    if tiles.splits == 1:
        partial = arrived = product
    else:
        partial = activations.new_empty(grid[0] * grid[1] * grid[2] * tiles.outputs * row_tile, dtype=torch.float32)
        arrived = counters(device, grid[0] * grid[2])
    _int8_product[grid](
        activations, weight, scales, product if bias is None else bias, product, partial, arrived,
        rows, outputs, inner, activations.stride(0),
        BIAS=bias is not None, ROWS=row_tile, OUTPUTS=tiles.outputs, INNER=tiles.inner, SPLITS=tiles.splits,
        EVEN=inner % tiles.inner == 0, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return product


# Not specialized on the rows: a batch of another size must not mean another compilation in the middle of serving.
@triton.jit(do_not_specialize=["rows"])
def _int8_product(
    activations, weight, scales, bias, product, partial, arrived,
    rows, outputs, inner, stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One program: OUTPUTS outputs of ROWS rows over one stretch of the inner dimension.

    activations: [rows, inner], rows `stride` apart. weight: [outputs, inner]. product: [rows, outputs]. partial: a
    [OUTPUTS, ROWS] tile for every program. arrived: zeros, one for every tile of the product; left as zeros.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, INNER)
    # What a tile has too much of is the last output once more, computed and not stored: no mask on the weight.
    known_output = tl.minimum(output, outputs - 1)
    weights = weight + known_output.to(tl.int64)[:, None] * inner + column[None, :]
    inputs = activations + row.to(tl.int64)[:, None] * stride + column[None, :]
    is_row = row[:, None] < rows

    stretch = tl.cdiv(tl.cdiv(inner, INNER), SPLITS) * INNER
    first = split * stretch
    total = tl.zeros((OUTPUTS, ROWS), dtype=tl.float32)
    for start in range(first, tl.minimum(first + stretch, inner), INNER):
        if EVEN:
            narrow = tl.load(weights + start, eviction_policy="evict_first")
            taken = tl.load(inputs + start, mask=is_row, other=0.0)
        else:
            inside = start + column[None, :] < inner
            narrow = tl.load(weights + start, mask=inside, other=0, eviction_policy="evict_first")
            taken = tl.load(inputs + start, mask=is_row & inside, other=0.0)
        total = tl.dot(_widened(narrow, taken.dtype), tl.trans(taken), total)

    if SPLITS == 1:
        _store(total, scales, bias, product, output, known_output, row, rows, outputs, BIAS)
    else:
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        meeting = row_tile * tl.num_programs(0) + tile
        tiles = partial + meeting.to(tl.int64) * SPLITS * OUTPUTS * ROWS
        tl.store(tiles + split * OUTPUTS * ROWS + place, total)
        # All threads' parts must be written before the one that counts says so.
        tl.debug_barrier()
        if tl.atomic_add(arrived + meeting, 1, sem="acq_rel") == SPLITS - 1:
            # First to last and not in the order of arrival, its own part too. Past the first-level cache, which
            # doesn't hear of other multiprocessors' writes.
            total = tl.load(tiles + place, cache_modifier=".cg")
            for other in range(1, SPLITS):
                total += tl.load(tiles + other * OUTPUTS * ROWS + place, cache_modifier=".cg")
            _store(total, scales, bias, product, output, known_output, row, rows, outputs, BIAS)
            # For the next product, which may be the same one again in a CUDA graph.
            tl.store(arrived + meeting, 0)


@triton.jit
def _widened(narrow, dtype: tl.constexpr):
    """Return 8-bit integers as floats, exactly.

    For float16 by its bits: with the exponent of 1024 the low bits of a float16 count ones. That is half as many
    instructions as a conversion, two numbers at a time, and multiprocessors convert at a fraction of their rate.
    """
    if dtype == tl.float16:
        bits = (narrow.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        wide = bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        wide = narrow.to(dtype)
    return wide


@triton.jit
def _store(total, scales, bias, product, output, known_output, row, rows, outputs, BIAS: tl.constexpr):
    """Scale a finished [OUTPUTS, ROWS] tile and write it."""
    total *= tl.load(scales + known_output)[:, None]
    if BIAS:
        total += tl.load(bias + known_output).to(tl.float32)[:, None]
    place = product + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, total.to(product.dtype.element_ty), mask=(output[:, None] < outputs) & (row[None, :] < rows))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        # The interpreter runs one program after the other; so many as make it take the way of a GPU.
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
