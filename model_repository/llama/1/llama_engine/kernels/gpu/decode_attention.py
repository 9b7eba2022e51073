"""Decode attention on a GPU: every row reads only its own positions of the KV cache, in a fixed order.

Attention with a mask reads as many positions of every row as the longest row has, and its tiling depends on all rows.
Here a program belongs to one row and one key-value head (with all query heads that share it) and iterates over that
row's positions. What it reads and the order of its sums depend on the row's own length alone, so a row's result is the
same bits in every batch. Specified by `gpu_reference.decode_attention`. Imports the Triton language: import this module
only on a GPU (as `gpu_kernels` does) or under the Triton interpreter.

A long row is cut into spans of SPAN positions, one program each, because a single row would leave most of a GPU idle.
The cuts are fixed; the last program of a row to arrive combines the spans, first to last.

Scores, the online softmax (arXiv:1805.02867), weights and sums are float32. The tensor cores take 16-bit operands:
query, keys and values are 16 bits; a weight is passed as two 16-bit halves, its rounded value and the remainder.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from llama_engine.kernels.gpu.arrival_counters import counters

SPAN = 512
"""Positions per program."""

BLOCK = 64
"""Positions per iteration; divides SPAN."""

GROUP_TILE = 16
"""Query heads per program, mostly padding: the smallest tile of the tensor cores."""


def decode_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Return [rows, heads, head dim] as specified by `gpu_reference.decode_attention`.

    query: [rows, heads, head dim]. keys, values: [slots, key-value heads, span, head dim], of the same strides, such as
    views of the KV cache; the span decides only the number of programs. slots, lengths: [rows], on the device; lengths
    are cut to the span. The head dim is a power of two from 16 to 256 and contiguous. Not for concurrent streams: the
    arrival counters are per device.
    """
    rows, heads, dim = query.shape
    key_value_heads, span = keys.shape[1], keys.shape[2]
    group = heads // key_value_heads
    assert dim in (16, 32, 64, 128, 256), f"head dim is {dim}; it must be a power of two from 16 to 256"
    assert group <= GROUP_TILE, f"{group} query heads share a key-value head; the bound is {GROUP_TILE}"
    assert keys.stride() == values.stride(), "keys and values have different strides"
    assert keys.stride(3) == query.stride(2) == 1, "the head dim is not contiguous"
    spans = triton.cdiv(span, SPAN)
    attended = query.new_empty(rows, heads, dim)
    if spans == 1:
        partial = arrived = attended
    else:
        size = rows * key_value_heads * spans * group * (dim + 2)
        partial = query.new_empty(size, dtype=torch.float32)
        arrived = counters(query.device, rows * key_value_heads)
    _decode_attention[(rows, key_value_heads, spans)](
        query, keys, values, slots, lengths, attended, partial, arrived, scaling, span,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), keys.stride(2),
        GROUP=group, TILE=GROUP_TILE, DIM=dim, BLOCK=BLOCK, SPAN=SPAN, LONG=spans > 1, num_warps=4, num_stages=3,
        enable_fp_fusion=False,
    )  # fmt: skip
    return attended


# Not specialized on the span: a new longest row must not trigger a compilation while serving.
@triton.jit(do_not_specialize=["span"])
def _decode_attention(
    query, keys, values, slots, lengths, attended, partial, arrived, scaling, span,
    query_row, query_head, slot_stride, head_stride, position_stride,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    LONG: tl.constexpr,
):  # fmt: skip
    """One program: one row, one key-value head, one span.

    Shapes as in `decode_attention`. partial: per program, sums [GROUP, DIM], largest scores [GROUP] and total weights
    [GROUP]. arrived: zeros, one per row and key-value head; reset to zeros.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.minimum(tl.load(lengths + row).to(tl.int32), span)
    # At least one: the first program writes the zeros of a row of length 0.
    parts = tl.maximum(tl.cdiv(length, SPAN), 1)
    if part < parts:
        member = tl.arange(0, TILE)
        dim = tl.arange(0, DIM)
        query_place = row.to(tl.int64) * query_row + (head * GROUP + member)[:, None] * query_head + dim[None, :]
        queries = tl.load(query + query_place, mask=member[:, None] < GROUP, other=0.0)
        # 64 bits: a cache may have more elements than 32 bits can count.
        origin = tl.load(slots + row).to(tl.int64) * slot_stride + head.to(tl.int64) * head_stride

        best = tl.full((TILE,), float("-inf"), dtype=tl.float32)
        weight = tl.zeros((TILE,), dtype=tl.float32)
        total = tl.zeros((TILE, DIM), dtype=tl.float32)
        for start in range(part * SPAN, tl.minimum(part * SPAN + SPAN, length), BLOCK):
            position = start + tl.arange(0, BLOCK)
            held = position < length
            place = origin + position.to(tl.int64)[:, None] * position_stride + dim[None, :]
            # Positions from the length on are not even loaded: masking scores is not enough, as zero times a stale
            # NaN is NaN.
            key = tl.load(keys + place, mask=held[:, None], other=0.0)
            value = tl.load(values + place, mask=held[:, None], other=0.0)
            scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scaling
            scores = tl.where(held[None, :], scores, float("-inf"))
            better = tl.maximum(best, tl.max(scores, 1))
            fade = tl.exp(best - better)
            weights = tl.exp(scores - better[:, None])
            weight = weight * fade + tl.sum(weights, 1)
            total = total * fade[:, None]
            best = better
            high = weights.to(value.dtype)
            if value.dtype != tl.float32:
                low = (weights - high.to(tl.float32)).to(value.dtype)
                total = tl.dot(low, value, total)
            total = tl.dot(high, value, total, input_precision="ieee")

        if LONG:
            if parts == 1:
                _store(attended, total, weight, row, head, member, dim, GROUP, DIM)
            else:
                meeting = row * tl.num_programs(1) + head
                size = GROUP * (DIM + 2)
                tiles = partial + meeting.to(tl.int64) * tl.num_programs(2) * size
                is_member = member < GROUP
                sums, is_sum = member[:, None] * DIM + dim[None, :], member[:, None] < GROUP
                bests, weights = GROUP * DIM + member, GROUP * DIM + GROUP + member
                mine = tiles + part * size
                tl.store(mine + sums, total, mask=is_sum)
                tl.store(mine + bests, best, mask=is_member)
                tl.store(mine + weights, weight, mask=is_member)
                # All threads must have stored their part before one of them counts the arrival.
                tl.debug_barrier()
                if tl.atomic_add(arrived + meeting, 1, sem="acq_rel") == parts - 1:
                    # In order of the spans, not of arrival. Bypasses the L1 cache, which is not coherent with other
                    # multiprocessors' writes.
                    total = tl.load(tiles + sums, mask=is_sum, other=0.0, cache_modifier=".cg")
                    best = tl.load(tiles + bests, mask=is_member, other=0.0, cache_modifier=".cg")
                    weight = tl.load(tiles + weights, mask=is_member, other=0.0, cache_modifier=".cg")
                    for other in range(1, parts):
                        theirs = tiles + other * size
                        other_best = tl.load(theirs + bests, mask=is_member, other=0.0, cache_modifier=".cg")
                        other_weight = tl.load(theirs + weights, mask=is_member, other=0.0, cache_modifier=".cg")
                        other_total = tl.load(theirs + sums, mask=is_sum, other=0.0, cache_modifier=".cg")
                        better = tl.maximum(best, other_best)
                        fade, other_fade = tl.exp(best - better), tl.exp(other_best - better)
                        weight = weight * fade + other_weight * other_fade
                        total = total * fade[:, None] + other_total * other_fade[:, None]
                        best = better
                    _store(attended, total, weight, row, head, member, dim, GROUP, DIM)
                    # Reset for the next kernel, which may be this one in a replayed CUDA graph.
                    tl.store(arrived + meeting, 0)
        else:
            _store(attended, total, weight, row, head, member, dim, GROUP, DIM)


@triton.jit
def _store(attended, total, weight, row, head, member, dim, GROUP: tl.constexpr, DIM: tl.constexpr):
    """Divide the sums [TILE, DIM] by the total weights [TILE]; store the rows of the group's members."""
    # Only a row without positions has weight 0. A non-finite row must stay non-finite: the engine detects it by that.
    total /= tl.where(weight == 0.0, 1.0, weight)[:, None]
    heads = tl.num_programs(1) * GROUP
    place = (row.to(tl.int64) * heads + head * GROUP + member)[:, None] * DIM + dim[None, :]
    tl.store(attended + place, total.to(attended.dtype.element_ty), mask=member[:, None] < GROUP)
