"""The KV cache against a naive one; nothing of a former sequence reaches the next."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from engine.engines import alone, completions, engine_of, runner_of
from engine.prompts import requests_of
from llama_engine.kernels import reference
from llama_engine.kernels.selection import DecodeAttention, Kernels
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint

CPU = torch.device("cpu")
SHAPE = KVCacheShape(layers=2, slots=4, key_value_heads=3, max_model_len=20, head_dim=8, dtype=torch.float32)

LARGEST_ERROR = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.int8: 1 / 254}
"""Of a stored number, relative to the largest of its head."""


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_random_writes_reads_and_clearings_agree_with_a_naive_cache(dtype: torch.dtype) -> None:
    """naive: keys and values, [2, layers, slots, heads, positions, head dim], written one position at a time."""
    randomness, generator = random.Random(1), torch.Generator().manual_seed(1)
    cache = KVCache(replace(SHAPE, dtype=dtype), CPU)
    naive = torch.zeros(2, SHAPE.layers, SHAPE.slots, SHAPE.key_value_heads, SHAPE.positions, SHAPE.head_dim)
    for _ in range(300):
        if randomness.random() < 0.1:
            cleared = randomness.sample(range(4), 2)
            cache.zero(cleared)
            naive[:, :, cleared] = 0
        places = randomness.sample(list(product(range(4), range(20))), randomness.randint(1, 9))
        slots, positions = torch.tensor(places).T
        for layer in range(SHAPE.layers):
            states = torch.randn(2, len(places), SHAPE.key_value_heads, SHAPE.head_dim, generator=generator)
            for row, (slot, position) in enumerate(places):
                naive[:, layer, slot, :, position] = states[:, row]
            cache.write(layer, slots, positions, states[0], states[1])
            slot, length = randomness.randrange(4), randomness.randint(1, 20)
            for seen, expected in zip(cache.read(layer, slot, length, torch.float32), naive, strict=True):
                exact = expected[layer, slot, :, :length]
                largest = exact.abs().amax(-1, keepdim=True)
                assert ((seen - exact).abs() <= 1.001 * LARGEST_ERROR[dtype] * largest).all()
            gathered = cache.gather(layer, torch.tensor([slot, 0]), length, torch.float32)
            for rows, seen in zip(gathered, cache.read(layer, slot, length, torch.float32), strict=True):
                assert torch.equal(rows[0], seen)


def test_a_cache_in_the_dtype_of_the_model_is_read_in_place() -> None:
    cache = KVCache(SHAPE, CPU)
    keys, values = cache.read(1, 2, 7, torch.float32)
    assert keys.untyped_storage().data_ptr() == cache.keys.untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == cache.values.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_the_shape_counts_the_bytes_that_are_allocated(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype, spare=1)
    cache = KVCache(shape, CPU)
    tensors = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    assert shape.bytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("attention", [None, reference.decode_attention], ids=["alone", "by row"])
def test_stale_values_change_no_token(fp32: Checkpoint, attention: DecodeAttention | None) -> None:
    checkpoint, requests = replace(fp32, kernels=Kernels(attention=attention)), requests_of(fp32, 6, range(1, 90), 10)
    engine = engine_of(checkpoint, 2)
    # A position beyond a row's own is not even read.
    runner_of(engine).kv_cache.keys.fill_(torch.nan)
    runner_of(engine).kv_cache.values.fill_(torch.nan)
    assert completions(engine, requests) == alone(checkpoint, requests)
