"""Attention over a GPU's KV cache with PyTorch's FlashAttention for variable lengths, in one call per pass.

Each sequence attends to its own positions only, without masks or padding. The keys of a sequence are never split among
thread blocks (`num_splits=1`), so that, as PyTorch documents, a sequence's result has the same bits in any batch. This
module has not run on a GPU yet: it is compared with its reference when the model loads, and if that fails, attention
with masks is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from llama_engine.errors import one_line
from llama_engine.kernels.cache_shape import GPU_PAGE_SIZE
from llama_engine.kernels.gpu import gpu_reference
from llama_engine.kernels.transfers import lists_to_device

TOLERANCE = 2e-2
"""Tolerated error, relative to the reference's largest value: a few bfloat16 roundings."""

MIN_CAPABILITY = (8, 0)
"""Minimum compute capability of FlashAttention: Ampere."""

_SELF_TEST_LENGTHS = (1, 67, 600)
_SELF_TEST_QUERIES = (1, 3, 64)
"""Number of queries of each sequence in the self-test's prefill; they are its last positions."""

_SELF_TEST_WINDOW = 40
"""Window of a second self-test."""

_log = logging.getLogger(__name__)


class Layout(NamedTuple):
    """The sequences of one attention call, whose queries are concatenated.

    pages: [n, columns], int32, each sequence's entries of the page table. first: [n + 1], int32, index of each
    sequence's first query, and the number of all queries. lengths: [n], int32, positions in the KV cache, the last
    query's included. max_queries, max_length: upper bounds of the queries and the length of a sequence.
    """

    pages: torch.Tensor
    first: torch.Tensor
    lengths: torch.Tensor
    max_queries: int
    max_length: int


VarlenAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout, float, int | None], torch.Tensor]
"""(query [n, heads, dim], keys, values [pages, page size, KV heads, dim], layout, scaling, window) → the
result [n, heads, dim]."""


def varlen_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: Layout, scaling: float, window: int | None
) -> torch.Tensor:
    """Return the causal attention [n, heads, dim] of queries at the last positions of their sequences.

    query: [n, heads, dim], float16 or bfloat16, the dtype of the cache. keys, values: one layer of the KV cache,
    [pages, page size, KV heads, dim], contiguous. window: number of positions that a query attends to; None is all.
    """
    # Imported here because only GPUs use it.
    from torch.nn.attention.varlen import varlen_attn

    attended = varlen_attn(
        query,
        keys,
        values,
        layout.first,
        # FlashAttention 2 requires this tensor, but doesn't read it where keys are in pages.
        layout.first,
        layout.max_queries,
        layout.max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != keys.shape[2],
        seqused_k=layout.lengths,
        block_table=layout.pages,
        num_splits=1,
    )
    assert isinstance(attended, torch.Tensor)
    return attended


def choose_attention(
    device: torch.device, dtype: torch.dtype, head_dim: int, group: int, windowed: bool = False
) -> VarlenAttention | None:
    """Return FlashAttention for a model on this GPU; log a warning and return None if it can't be used.

    dtype: that of activations and KV cache. group: query heads per KV head. windowed: whether some layers have a
    window.
    """
    try:
        if torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            raise RuntimeError("this GPU is older than Ampere")
        for window in (None, _SELF_TEST_WINDOW) if windowed else (None,):
            _self_test(varlen_attention, device, dtype, head_dim, group, window)
    except Exception as error:  # noqa: BLE001 - fall back to attention with masks
        _log.warning("FlashAttention can't be used; attention takes masks: %s", one_line(error))
        return None
    return varlen_attention


def _self_test(
    attention: VarlenAttention, device: torch.device, dtype: torch.dtype, head_dim: int, group: int, window: int | None
) -> None:
    """Raise RuntimeError unless a batch's attention agrees with the reference and with each sequence computed alone."""
    generator = torch.Generator(device).manual_seed(0)
    columns = -(-max(_SELF_TEST_LENGTHS) // GPU_PAGE_SIZE) + 1
    shape = (len(_SELF_TEST_LENGTHS) * columns, GPU_PAGE_SIZE, 2, head_dim)
    keys, values = torch.randn(2, *shape, device=device, generator=generator).to(dtype)
    # No sequence's pages are in order or side by side.
    table = torch.arange(len(keys), dtype=torch.int32, device=device).flip(0).view(columns, -1).T.contiguous()
    slots = list(reversed(range(len(_SELF_TEST_LENGTHS))))
    for counts in (_SELF_TEST_QUERIES, (1,) * len(_SELF_TEST_LENGTHS)):
        query = torch.randn(sum(counts), 2 * group, head_dim, device=device, generator=generator).to(dtype)
        layout = layout_of(slots, counts, _SELF_TEST_LENGTHS, table)
        together = attention(query, keys, values, layout, head_dim**-0.5, window)
        alone = []
        parts = torch.split(query, list(counts))
        for slot, count, length, part in zip(slots, counts, _SELF_TEST_LENGTHS, parts, strict=True):
            cached = keys[table[slot]].flatten(0, 1), values[table[slot]].flatten(0, 1)
            expected = gpu_reference.attention(part, *cached, length, head_dim**-0.5, window)
            layout = layout_of([slot], [count], [length], table)
            alone.append(attention(part, keys, values, layout, head_dim**-0.5, window))
            error = (alone[-1].double() - expected.double()).abs().max().item() / expected.double().abs().max().item()
            # Not `error > TOLERANCE`, so that NaN fails, too.
            if not error <= TOLERANCE:
                raise RuntimeError(f"its result is wrong by {error:.1%} of the largest value")
        if not torch.equal(torch.cat(alone), together):
            raise RuntimeError("on this GPU a sequence's result depends on its neighbours")


def layout_of(slots: Sequence[int], counts: Sequence[int], lengths: Sequence[int], page_table: torch.Tensor) -> Layout:
    """Return the layout of sequences with these KV slots, numbers of queries (counts) and lengths.

    page_table: [slots, columns], int32, on the device.
    """
    numbers = (slots, [0, *accumulate(counts)], lengths)
    indices, first, on_device = lists_to_device(numbers, page_table.device, torch.int32)
    return Layout(page_table[indices], first, on_device, max(counts), max(lengths))
