"""The 8-bit product on a GPU: weights are widened in registers inside the matrix product.

Device memory is read at one byte per weight, and the widened weight is never stored. Specified by
`gpu_reference.int8_product`. Imports the Triton language: import this module only on a GPU (as `gpu_kernels` does) or
under the Triton interpreter.

**Batch invariance.** Each output is a sum over `in`, in an order that depends on the shape of the weight alone: the
inner dimension is cut into SPLITS stretches, a stretch into blocks of INNER, a block into the 16-wide steps of the
tensor cores. A stretch accumulates in float32; the last program to arrive adds the stretches, first to last. The number
of rows decides only the width of the tile across that direction (ROW_TILES) and the number of tiles. The weight is the
left operand, so that the rows are the narrow side of the tensor core instruction and not its 64-wide side: one row
costs a tile of 16. No document promises that the instruction accumulates alike at every width; `gpu_kernels` checks it
on the GPU at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl

from llama_engine.kernels.gpu.arrival_counters import counters

ROW_TILES = (16, 32, 64)
"""Rows per program; more rows than the largest take several tiles. No tile of 8: on Hopper, Triton 3.7 compiles it to
another matrix instruction (mma instead of wgmma), which may accumulate in another order."""


@dataclass(frozen=True)
class Tiles:
    """The tiling of a weight: depends on its shape and the GPU, never on the rows, because it fixes the order of sums.

    outputs, inner: shape of the block that a program widens at a time. splits: programs that share the inner dimension.
    stages: blocks prefetched from memory. warps: per program; Hopper's matrix instructions need 4.
    """

    outputs: int = 64
    inner: int = 128
    splits: int = 1
    stages: int = 4
    warps: int = 4


def tiles_for(outputs: int, inner: int, processors: int) -> Tiles:
    """Return the tiling of a weight of [outputs, inner] for a GPU with `processors` multiprocessors.

    Full memory bandwidth needs more than one program per multiprocessor: a weight with too few rows of tiles is split
    along its inner dimension, as long as each stretch fills the prefetch pipeline.
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
    """Return [rows, out] as specified by `gpu_reference.int8_product`; tuned for the few rows of a decode step.

    activations: [rows, in], float16 or bfloat16; copied unless each row is contiguous. weight: [out, in], contiguous.
    tiles: the tiling, which fixes the order of sums. Not for concurrent streams: the arrival counters are per device.
    """
    rows, inner = activations.shape
    outputs = weight.shape[0]
    assert weight.shape[1] == inner, f"{inner} activations per row, but the weight has {weight.shape[1]} columns"
    assert weight.dtype == torch.int8, f"the weight is {weight.dtype}"
    assert weight.is_contiguous(), "the weight is not contiguous"
    assert activations.dtype in (torch.float16, torch.bfloat16), (
        f"the activations are {activations.dtype}; they must have 16 bits"
    )
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


# Not specialized on the rows: a new batch size must not trigger a compilation while serving.
@triton.jit(do_not_specialize=["rows"])
def _int8_product(
    activations, weight, scales, bias, product, partial, arrived,
    rows, outputs, inner, stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INNER: tl.constexpr, SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """One program: OUTPUTS outputs of ROWS rows over one stretch of the inner dimension.

    activations: [rows, inner], rows `stride` apart. weight: [outputs, inner]. product: [rows, outputs]. partial: one
    [OUTPUTS, ROWS] tile per program. arrived: zeros, one per tile of the product; reset to zeros.
    """
    tile, split, row_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, INNER)
    # Outputs beyond the last repeat it, computed but not stored: the weight needs no mask.
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
        # All threads must have stored their part before one of them counts the arrival.
        tl.debug_barrier()
        if tl.atomic_add(arrived + meeting, 1, sem="acq_rel") == SPLITS - 1:
            # In order of the stretches, not of arrival. Bypasses the L1 cache, which is not coherent with other
            # multiprocessors' writes.
            total = tl.load(tiles + place, cache_modifier=".cg")
            for other in range(1, SPLITS):
                total += tl.load(tiles + other * OUTPUTS * ROWS + place, cache_modifier=".cg")
            _store(total, scales, bias, product, output, known_output, row, rows, outputs, BIAS)
            # Reset for the next kernel, which may be this one in a replayed CUDA graph.
            tl.store(arrived + meeting, 0)


@triton.jit
def _widened(narrow, dtype: tl.constexpr):
    """Return 8-bit integers as floats, exactly.

    For float16 through its bits: with the exponent of 1024, the low bits of a float16 count ones. This takes half the
    instructions of a conversion, two numbers at a time; conversions run at a fraction of the arithmetic rate.
    """
    if dtype == tl.float16:
        bits = (narrow.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        wide = bits.to(tl.float16, bitcast=True) - 1152.0
    else:
        wide = narrow.to(dtype)
    return wide


@triton.jit
def _store(total, scales, bias, product, output, known_output, row, rows, outputs, BIAS: tl.constexpr):
    """Scale a finished [OUTPUTS, ROWS] tile and store it."""
    total *= tl.load(scales + known_output)[:, None]
    if BIAS:
        total += tl.load(bias + known_output).to(tl.float32)[:, None]
    place = product + row.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(place, total.to(product.dtype.element_ty), mask=(output[:, None] < outputs) & (row[None, :] < rows))


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        # Enough for the interpreter to split weights as a GPU does.
        return 2
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
