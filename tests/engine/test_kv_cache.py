"""The KV cache against a naive one; nothing of a former sequence reaches the next."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from engine.engines import alone, completions, engine_of
from engine.forward_passes import before_each
from engine.requests import request_of, requests_of
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint

CPU = torch.device("cpu")
SHAPE = KVCacheShape(layers=2, slots=4, key_value_heads=3, max_model_len=20, head_dim=8, dtype=torch.float32)


def _random_states(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, SHAPE.key_value_heads, width, SHAPE.head_dim, generator=generator)


def test_random_writes_reads_and_copies_agree_with_a_naive_cache() -> None:
    """naive: keys and values, [2, layers, slots, heads, positions, head dim], written one position at a time."""
    randomness, generator = random.Random(1), torch.Generator().manual_seed(1)
    cache = KVCache(SHAPE, CPU)
    naive = torch.zeros(2, SHAPE.layers, SHAPE.slots, SHAPE.key_value_heads, SHAPE.max_model_len, SHAPE.head_dim)
    for _ in range(300):
        if randomness.random() < 0.2:
            source, target, length = randomness.randrange(4), randomness.randrange(4), randomness.randint(0, 20)
            cache.copy(source, target, length)
            for position in range(length):
                naive[:, :, target, :, position] = naive[:, :, source, :, position].clone()
            continue
        first = randomness.randrange(4)
        rows, width = randomness.randint(1, 4 - first), randomness.choice((1, 1, 5))
        starts = torch.tensor([randomness.randint(0, SHAPE.max_model_len - width) for _ in range(rows)])
        positions = starts[:, None] + torch.arange(width)
        span = randomness.randint(int(positions.max()) + 1, SHAPE.max_model_len)
        cache.bind(first, positions, span)
        assert cache.get_seq_length() == span
        for layer in range(SHAPE.layers):
            states = _random_states(rows, width, generator), _random_states(rows, width, generator)
            for row, column in product(range(rows), range(width)):
                for which in (0, 1):
                    place = naive[which, layer, first + row, :, int(positions[row, column])]
                    place.copy_(states[which][row, :, column])
            seen = cache.update(states[0], states[1], layer)
            for which in (0, 1):
                assert torch.equal(seen[which], naive[which, layer, first : first + rows, :, :span])


def test_reading_returns_views_of_the_cache() -> None:
    cache = KVCache(SHAPE, CPU)
    cache.bind(1, torch.tensor([[3], [7]]), 12)
    states = _random_states(2, 1, torch.Generator().manual_seed(0))
    keys, values = cache.update(states, states, 0)
    assert keys.untyped_storage().data_ptr() == cache.slot_layers[0].keys.untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == cache.slot_layers[0].values.untyped_storage().data_ptr()


def test_zero_clears_its_slots_and_no_others() -> None:
    cache = KVCache(SHAPE, CPU)
    for layer in cache.slot_layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.inf)
    cache.zero(1, 3)
    for layer in cache.slot_layers:
        for states in (layer.keys, layer.values):
            assert not states[1:3].any()
            assert not states[[0, 3]].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_planned_bytes_are_allocated(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype)
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in KVCache(shape, CPU).slot_layers)
    assert shape.bytes == shape.bytes_per_token * 4 * 20 == allocated


def test_stale_values_change_no_token(fp32: Checkpoint) -> None:
    requests = requests_of(fp32, 6, range(1, 90), 10)
    expected = [alone(fp32, [request])[0] for request in requests]

    def leave_stale_values(number: int, cache: KVCache) -> None:
        if number == 0:
            for layer in cache.slot_layers:
                layer.keys.fill_(1e4)
                layer.values.fill_(-1e4)

    engine = engine_of(fp32, 2)
    with before_each(fp32, leave_stale_values):
        assert [completions(engine, [request])[0] for request in requests] == expected


def test_attention_reads_the_prompt_and_then_whole_buckets_up_to_the_end(fp32: Checkpoint) -> None:
    engine = engine_of(replace(fp32, max_model_len=150), 2)
    spans: list[int] = []
    with before_each(fp32, lambda number, cache: spans.append(cache.get_seq_length())):
        completions(engine, [request_of(fp32, 0, 60, 90), request_of(fp32, 1, 9, 3)])
    # The longer sequence's tokens go to positions 60 to 148.
    assert spans == [60] + [64] * 4 + [128] * 64 + [150] * 21
