"""The slot cache against a naive one, and that nothing of a former row reaches the next."""

import random
from dataclasses import replace

import pytest
import torch
from engine.engines import completions, engine_of
from engine.forward_passes import before_each
from engine.prompts import random_prompt
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.model.kv_cache import KVCache, KVCacheShape
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Completion

CPU = torch.device("cpu")
SHAPE = KVCacheShape(layers=2, slots=4, key_value_heads=3, max_model_len=20, head_dim=8, dtype=torch.float32)


def _random_states(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, SHAPE.key_value_heads, width, SHAPE.head_dim, generator=generator)


def test_what_is_read_is_not_what_was_written() -> None:
    """Random prefills, steps and moves, compared with a dictionary of (layer, slot, position)."""
    randomness, generator = random.Random(1), torch.Generator().manual_seed(1)
    cache = KVCache(SHAPE, CPU)
    naive: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}
    for _ in range(300):
        if randomness.random() < 0.2:
            source, target, length = randomness.randrange(4), randomness.randrange(4), randomness.randint(0, 20)
            cache.move(source, target, length)
            for layer in range(SHAPE.layers):
                for position in range(length):
                    if (layer, source, position) in naive:
                        naive[layer, target, position] = naive[layer, source, position]
                    else:
                        naive.pop((layer, target, position), None)
            continue
        first = randomness.randrange(4)
        rows, width = randomness.randint(1, 4 - first), randomness.choice((1, 1, 5))
        starts = torch.tensor([randomness.randint(0, SHAPE.max_model_len - width) for _ in range(rows)])
        positions = starts[:, None] + torch.arange(width)
        span = randomness.randint(int(positions.max()) + 1, SHAPE.max_model_len)
        cache.aim(first, positions, span)
        assert cache.get_seq_length() == span
        for layer in range(SHAPE.layers):
            keys, values = _random_states(rows, width, generator), _random_states(rows, width, generator)
            for row in range(rows):
                for column in range(width):
                    place = (layer, first + row, int(positions[row, column]))
                    naive[place] = (keys[row, :, column], values[row, :, column])
            seen_keys, seen_values = cache.update(keys, values, layer)
            assert seen_keys.shape == seen_values.shape == (rows, SHAPE.key_value_heads, span, SHAPE.head_dim)
            nothing = torch.zeros(SHAPE.key_value_heads, SHAPE.head_dim)
            for row in range(rows):
                for position in range(span):
                    key, value = naive.get((layer, first + row, position), (nothing, nothing))
                    assert torch.equal(seen_keys[row, :, position], key)
                    assert torch.equal(seen_values[row, :, position], value)


def test_reading_copies_the_cache() -> None:
    cache = KVCache(SHAPE, CPU)
    cache.aim(1, torch.tensor([[3], [7]]), 12)
    states = _random_states(2, 1, torch.Generator().manual_seed(0))
    keys, values = cache.update(states, states, 0)
    assert keys.untyped_storage().data_ptr() == cache.slot_layers[0].keys.untyped_storage().data_ptr()
    assert values.untyped_storage().data_ptr() == cache.slot_layers[0].values.untyped_storage().data_ptr()


def test_a_wiped_slot_keeps_something_or_takes_its_neighbours_with_it() -> None:
    cache = KVCache(SHAPE, CPU)
    for layer in cache.slot_layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.inf)
    cache.wipe(2)
    for layer in cache.slot_layers:
        assert not layer.keys[2].any()
        assert not layer.values[2].any()
        assert not layer.keys[[0, 1, 3]].isfinite().any()
        assert not layer.values[[0, 1, 3]].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_plan_is_not_what_is_allocated(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype)
    cache = KVCache(shape, CPU)
    allocated = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.slot_layers)
    assert shape.bytes == allocated
    assert shape.bytes_per_token * 4 * 20 == allocated


def test_what_a_former_row_left_behind_changes_the_next(fp32: Checkpoint) -> None:
    randomness = random.Random(2)
    prompts = [random_prompt(fp32.tokenizer, range(1, 90), randomness)[1] for _ in range(6)]
    requests = [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=10) for prompt in prompts]
    fresh = [completions(engine_of(fp32, 2), [request])[0] for request in requests]

    def leave_rubbish(number: int, cache: KVCache) -> None:
        if number == 0:
            for layer in cache.slot_layers:
                layer.keys.fill_(1e4)
                layer.values.fill_(-1e4)

    engine = engine_of(fp32, 2)
    with before_each(fp32, leave_rubbish):
        assert [completions(engine, [request])[0] for request in requests] == fresh


def test_attention_reads_more_or_less_than_the_buckets_it_should(fp32: Checkpoint) -> None:
    """A prefill reads its own width; a step reads whole buckets of 64 positions, up to the cache's end."""
    short = replace(fp32, max_model_len=150)
    engine = engine_of(short, 2)
    spans: list[int] = []
    prompts = [random_prompt(fp32.tokenizer, range(length, length + 1), random.Random(3))[1] for length in (60, 9)]
    requests = [
        GenerationRequest(prompt="", prompt_tokens=prompts[0], max_tokens=90, min_tokens=90),
        GenerationRequest(prompt="", prompt_tokens=prompts[1], max_tokens=3, min_tokens=3),
    ]
    with before_each(fp32, lambda number, cache: spans.append(cache.get_seq_length())):
        outcomes = engine.generate(requests)
    assert all(isinstance(outcome, Completion) for outcome in outcomes)
    # The longer row's token goes to positions 60 to 148.
    assert spans == [60] + [64] * 4 + [128] * 64 + [150] * 21
