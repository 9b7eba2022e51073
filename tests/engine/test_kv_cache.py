"""The KV cache against a naive one; nothing of a former sequence reaches the next."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from engine.engines import alone, completions, engine_of
from engine.forward_passes import ForwardPass, watching
from engine.prompts import request_of, requests_of
from llama_engine.kernels import reference
from llama_engine.kernels.selection import DecodeAttention, Kernels
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint

CPU = torch.device("cpu")
SHAPE = KVCacheShape(layers=2, slots=4, key_value_heads=3, max_model_len=20, head_dim=8, dtype=torch.float32)


def test_random_writes_reads_copies_and_clearings_agree_with_a_naive_cache() -> None:
    """naive: keys and values, [2, layers, slots, heads, positions, head dim], written one position at a time."""
    randomness, generator = random.Random(1), torch.Generator().manual_seed(1)
    cache = KVCache(SHAPE, CPU)
    naive = torch.zeros(2, SHAPE.layers, SHAPE.slots, SHAPE.key_value_heads, SHAPE.max_model_len, SHAPE.head_dim)
    for _ in range(300):
        first, action = randomness.randrange(4), randomness.random()
        rows, width = randomness.randint(1, 4 - first), randomness.choice((1, 1, 5))
        if action < 0.2:
            target, length = randomness.randrange(4), randomness.randint(0, 20)
            cache.copy(first, target, length)
            for position in range(length):
                naive[:, :, target, :, position] = naive[:, :, first, :, position].clone()
            continue
        if action < 0.25:
            cache.zero(first, first + rows)
            naive[:, :, first : first + rows] = 0
        starts = torch.tensor([randomness.randint(0, SHAPE.max_model_len - width) for _ in range(rows)])
        positions = starts[:, None] + torch.arange(width)
        span = randomness.randint(int(positions.max()) + 1, SHAPE.max_model_len)
        cache.bind(first, positions, span)
        assert cache.get_seq_length() == span
        for layer in range(SHAPE.layers):
            states = torch.randn(2, rows, SHAPE.key_value_heads, width, SHAPE.head_dim, generator=generator)
            for row, column in product(range(rows), range(width)):
                naive[:, layer, first + row, :, int(positions[row, column])] = states[:, row, :, column]
            seen = cache.update(states[0], states[1], layer)
            stored = (cache.slot_layers[layer].keys, cache.slot_layers[layer].values)
            for which in (0, 1):
                assert torch.equal(seen[which], naive[which, layer, first : first + rows, :, :span])
                # A view, not a copy.
                assert seen[which].untyped_storage().data_ptr() == stored[which].untyped_storage().data_ptr()


@pytest.mark.parametrize("attention", [None, reference.decode_attention], ids=["mask", "by row"])
def test_stale_values_change_no_token(fp32: Checkpoint, attention: DecodeAttention | None) -> None:
    checkpoint, requests = replace(fp32, kernels=Kernels(attention=attention)), requests_of(fp32, 6, range(1, 90), 10)
    engine = engine_of(checkpoint, 2)
    for layer in engine._batch.kv_cache.slot_layers:
        layer.keys.fill_(1e4)
        # Attention by row reads no stale value at all; behind a mask they count zero times.
        layer.values.fill_(-1e4 if attention is None else torch.nan)
    assert completions(engine, requests) == alone(checkpoint, requests)


def test_attention_reads_the_prompt_and_then_whole_buckets_up_to_the_end(fp32: Checkpoint) -> None:
    engine = engine_of(replace(fp32, max_model_len=150), 2)
    spans: list[int] = []

    def record(one: ForwardPass) -> None:
        spans.append(one.cache.get_seq_length())

    with watching(fp32, record):
        completions(engine, [request_of(fp32, 0, 60, 90), request_of(fp32, 1, 9, 3)])
    # The longer sequence's tokens go to positions 60 to 148.
    assert spans == [60] + [64] * 4 + [128] * 64 + [150] * 21
