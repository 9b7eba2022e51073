"""The fused decode attention against its reference; a row reads only its own positions."""

from __future__ import annotations

import pytest
import torch
from engine.triton_device import DEVICE, DTYPES, NO_LANGUAGE, assert_near, normal
from llama_engine.kernels.gpu import gpu_reference
from llama_engine.model.kv_cache import KVCache, KVCacheShape

pytest.importorskip("triton", reason=NO_LANGUAGE)
from llama_engine.kernels.gpu.arrival_counters import counters
from llama_engine.kernels.gpu.decode_attention import BLOCK, SPAN, decode_attention

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 0, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 7)


def decode_step(
    lengths: tuple[int, ...], heads: int, shared: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, keys, values, slots in another order than the rows, and lengths.

    Positions from a row's length on are not finite.
    """
    span = max(*lengths, 1)
    query = normal(len(lengths), heads, dim, seed=1, dtype=dtype)
    keys = normal(len(lengths), heads // shared, span, dim, seed=2, dtype=dtype)
    values = normal(len(lengths), heads // shared, span, dim, seed=3, dtype=dtype)
    slots = torch.arange(len(lengths), device=DEVICE).flip(0).roll(1)
    for slot, length in zip(slots.tolist(), lengths, strict=True):
        keys[slot, :, length:] = torch.nan
        values[slot, :, length:] = torch.inf
    return query, keys, values, slots, torch.tensor(lengths, device=DEVICE)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("heads", "shared", "dim"), [(2, 1, 64), (2, 1, 128), (4, 4, 64), (8, 4, 16)])
def test_the_fused_attention_is_that_of_the_reference(heads: int, shared: int, dim: int, dtype: torch.dtype) -> None:
    query, keys, values, slots, lengths = decode_step(LENGTHS, heads, shared, dim, dtype)
    attended = decode_attention(query, keys, values, slots, lengths, dim**-0.5)
    assert_near(attended, gpu_reference.decode_attention(query, keys, values, slots, lengths, dim**-0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    query, keys, values, slots, lengths = decode_step(LENGTHS, 2, 2, 64, dtype)
    together = decode_attention(query, keys, values, slots, lengths, 0.125)
    for row, length in enumerate(LENGTHS):
        at = slice(row, row + 1)
        for span in (max(length, 1), keys.shape[2]):
            views = keys[:, :, :span], values[:, :, :span]
            alone = decode_attention(query[at], *views, slots[at], lengths[at], 0.125)
            assert torch.equal(alone, together[at]), (length, span)


def test_a_row_that_is_not_finite_leaves_the_others_unchanged() -> None:
    lengths = (5, SPAN + 9, 40)
    query, keys, values, slots, counts = decode_step(lengths, 2, 1, 64, torch.float16)
    clean = decode_attention(query, keys, values, slots, counts, 0.125)
    keys[slots[1], :, SPAN + 3] = torch.nan
    spoiled = decode_attention(query, keys, values, slots, counts, 0.125)
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])


def test_scores_that_are_far_apart_do_not_overflow() -> None:
    query, keys, values, slots, lengths = decode_step((SPAN + 70, 3), 2, 1, 64, torch.float16)
    query *= 60
    keys *= 60
    attended = decode_attention(query, keys, values, slots, lengths, 1.0)
    assert attended.isfinite().all()
    assert_near(attended, gpu_reference.decode_attention(query, keys, values, slots, lengths, 1.0))


def test_a_view_of_the_kv_cache_is_read_in_place() -> None:
    shape = KVCacheShape(layers=1, slots=4, key_value_heads=2, max_model_len=96, head_dim=64, dtype=torch.float16)
    cache = KVCache(shape, DEVICE)
    cache.keys.copy_(normal(*cache.keys.shape, seed=4))
    cache.values.copy_(normal(*cache.values.shape, seed=5))
    slots, lengths = torch.tensor([3, 1], device=DEVICE), torch.tensor([31, 70], device=DEVICE)
    new = normal(2, 2, 64, seed=6)
    cache.write(0, slots, lengths - 1, new, new)
    keys, values = cache.keys[0, :, :, :70], cache.values[0, :, :, :70]
    # As in the model: a view of [rows, query and KV heads, head dim].
    query = normal(2, 6, 64, seed=7)[:, :4]
    expected = gpu_reference.decode_attention(query, keys, values, slots, lengths, 0.125)
    assert_near(decode_attention(query, keys, values, slots, lengths, 0.125), expected)


def test_the_counters_are_reset_for_the_next_kernel() -> None:
    query, keys, values, slots, lengths = decode_step((3, SPAN + 1, 3 * SPAN), 2, 2, 64, torch.float16)
    first = decode_attention(query, keys, values, slots, lengths, 0.125)
    assert not counters(DEVICE, 1).any()
    assert torch.equal(decode_attention(query, keys, values, slots, lengths, 0.125), first)
