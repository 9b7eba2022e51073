"""The fused decode attention against its reference; a row reads only its own positions."""

from __future__ import annotations

import pytest
import torch
from engine.triton_device import DEVICE, DTYPES, NO_LANGUAGE, assert_near, normal
from llama_engine.kernels import reference
from llama_engine.model.kv_cache import KVCache, KVCacheShape

pytest.importorskip("triton", reason=NO_LANGUAGE)
from llama_engine.kernels.arrival_counters import counters
from llama_engine.kernels.decode_attention import BLOCK, SPAN, decode_attention

LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 0, SPAN - 1, SPAN, SPAN + 1, 2 * SPAN + 7)


def decode_step(
    lengths: tuple[int, ...], heads: int, shared: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, keys, values and lengths; positions from a row's length on are not finite."""
    span = max(*lengths, 1)
    query = normal(len(lengths), heads, dim, seed=1, dtype=dtype)
    keys = normal(len(lengths), heads // shared, span, dim, seed=2, dtype=dtype)
    values = normal(len(lengths), heads // shared, span, dim, seed=3, dtype=dtype)
    for row, length in enumerate(lengths):
        keys[row, :, length:] = torch.nan
        values[row, :, length:] = torch.inf
    return query, keys, values, torch.tensor(lengths, device=DEVICE)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize(("heads", "shared", "dim"), [(2, 1, 64), (2, 1, 128), (4, 4, 64), (8, 4, 16)])
def test_the_fused_attention_is_that_of_the_reference(heads: int, shared: int, dim: int, dtype: torch.dtype) -> None:
    query, keys, values, lengths = decode_step(LENGTHS, heads, shared, dim, dtype)
    attended = decode_attention(query, keys, values, lengths, dim**-0.5)
    assert_near(attended, reference.decode_attention(query, keys, values, lengths, dim**-0.5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_in_every_batch(dtype: torch.dtype) -> None:
    query, keys, values, lengths = decode_step(LENGTHS, 2, 2, 64, dtype)
    together = decode_attention(query, keys, values, lengths, 0.125)
    for row, length in enumerate(LENGTHS):
        one = slice(row, row + 1)
        for span in (max(length, 1), keys.shape[2]):
            alone = decode_attention(query[one], keys[one, :, :span], values[one, :, :span], lengths[one], 0.125)
            assert torch.equal(alone, together[one]), (length, span)


def test_a_row_of_length_0_is_zeros() -> None:
    query, keys, values, lengths = decode_step((0, SPAN + 1, 0), 2, 1, 64, torch.float16)
    for attention in (decode_attention, reference.decode_attention):
        attended = attention(query, keys, values, lengths, 0.125)
        assert not attended[[0, 2]].any()
        assert attended[1].isfinite().all()


def test_a_row_that_is_not_finite_stays_so_and_leaves_the_others_unchanged() -> None:
    lengths = (5, SPAN + 9, 40)
    query, keys, values, counts = decode_step(lengths, 2, 1, 64, torch.float16)
    clean = decode_attention(query, keys, values, counts, 0.125)
    keys[1, :, SPAN + 3] = torch.nan
    spoiled = decode_attention(query, keys, values, counts, 0.125)
    assert spoiled[1].isnan().all()
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])


def test_scores_that_are_far_apart_do_not_overflow() -> None:
    query, keys, values, lengths = decode_step((SPAN + 70, 3), 2, 1, 64, torch.float16)
    query *= 60
    keys *= 60
    attended = decode_attention(query, keys, values, lengths, 1.0)
    assert attended.isfinite().all()
    assert_near(attended, reference.decode_attention(query, keys, values, lengths, 1.0))


def test_a_view_of_the_kv_cache_is_read_in_place() -> None:
    shape = KVCacheShape(layers=1, slots=4, key_value_heads=2, max_model_len=96, head_dim=64, dtype=torch.float16)
    cache = KVCache(shape, DEVICE)
    layer = cache.slot_layers[0]
    layer.keys.copy_(normal(*layer.keys.shape, seed=4))
    layer.values.copy_(normal(*layer.values.shape, seed=5))
    cache.bind(1, torch.tensor([[30], [69]], device=DEVICE), 70)
    new = normal(2, 2, 1, 64, seed=6)
    keys, values = cache.update(new, new, 0)
    # As in the model: [rows, heads, width, head dim], a view of [rows, width, heads, head dim].
    query = normal(2, 1, 4, 64, seed=7).transpose(1, 2)[:, :, 0]
    lengths = torch.tensor([31, 70], device=DEVICE)
    expected = reference.decode_attention(query, keys, values, lengths, 0.125)
    assert_near(decode_attention(query, keys, values, lengths, 0.125), expected)


def test_the_counters_are_reset_for_the_next_kernel() -> None:
    query, keys, values, lengths = decode_step((3, SPAN + 1, 3 * SPAN), 2, 2, 64, torch.float16)
    first = decode_attention(query, keys, values, lengths, 0.125)
    assert not counters(DEVICE, 1).any()
    assert torch.equal(decode_attention(query, keys, values, lengths, 0.125), first)
