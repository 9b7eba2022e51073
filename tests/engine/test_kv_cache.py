"""The KV cache against a naive one; nothing of a former sequence reaches the next."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import attention_by_sequence, completions, engine_of, load, spoil_cache
from engine.prompts import requests_of
from llama_engine.engine import memory_plan
from llama_engine.kernels.cache_shape import KVCacheShape
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import PromptChunk
from llama_engine.model.torch_runner import TorchRunner

CPU = torch.device("cpu")
SHAPE = KVCacheShape(
    layers=2, slots=4, key_value_heads=3, max_model_len=20, head_dim=8, dtype=torch.float32, page_size=8, pages=12
)
"""Two sequences of 24 positions share no page, and two of 20 don't fill their last one."""

LARGEST_ERROR = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.int8: 1 / 254}
"""Of a stored number, relative to the largest of its head."""


def _cache(dtype: torch.dtype, randomness: random.Random) -> KVCache:
    """Return a cache whose slots have all pages, in random order, and nothing but NaN (in INT8, in the scales)."""
    cache = KVCache(replace(SHAPE, dtype=dtype), CPU)
    for tensor in (cache.keys, cache.values, cache.key_scales, cache.value_scales):
        tensor.fill_(torch.nan if tensor.is_floating_point() else 127)
    pages = randomness.sample(range(1, 13), 12)
    for slot in range(4):
        cache.set_pages(slot, 0, pages[3 * slot : 3 * slot + 2])
        cache.set_pages(slot, 2, pages[3 * slot + 2 : 3 * slot + 3])
    return cache


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_random_writes_and_reads_agree_with_a_naive_cache(dtype: torch.dtype) -> None:
    """naive: keys and values, [2, layers, slots, positions, heads, head dim], written one position at a time."""
    randomness, generator = random.Random(1), torch.Generator().manual_seed(1)
    cache = _cache(dtype, randomness)
    naive = torch.zeros(2, SHAPE.layers, SHAPE.slots, SHAPE.key_value_heads, SHAPE.max_model_len, SHAPE.head_dim)
    written = torch.zeros(SHAPE.slots, SHAPE.max_model_len, dtype=torch.bool)
    for _ in range(300):
        tokens = randomness.sample(list(product(range(4), range(20))), randomness.randint(1, 9))
        slots, positions = torch.tensor(tokens).T
        written[slots, positions] = True
        for layer in range(SHAPE.layers):
            states = torch.randn(2, len(tokens), SHAPE.key_value_heads, SHAPE.head_dim, generator=generator)
            for row, (slot, position) in enumerate(tokens):
                naive[:, layer, slot, :, position] = states[:, row]
            cache.write(layer, cache.places(slots, positions), states[0], states[1])
            slot = randomness.randrange(4)
            # Of the positions up to the first that has not been written.
            length = randomness.randint(0, int(written[slot].long().cumprod(0).sum()))
            for seen, expected in zip(cache.read(layer, slot, length, torch.float32), naive, strict=True):
                exact = expected[layer, slot, :, :length]
                largest = exact.abs().amax(-1, keepdim=True)
                assert ((seen - exact).abs() <= 1.001 * LARGEST_ERROR[dtype] * largest).all()
            # Two rows of a span of which the first has `length` positions, and the second none.
            end = randomness.randint(max(length, 1), 20)
            held = torch.arange(end) < torch.tensor([[length], [0]])
            gathered = cache.gather(layer, torch.tensor([slot, 0]), held, torch.float32)
            for rows, seen in zip(gathered, cache.read(layer, slot, length, torch.float32), strict=True):
                assert torch.equal(rows[0, :, :length], seen)
                assert not rows[0, :, length:].any()
                assert not rows[1].any()


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_a_copied_page_has_the_keys_and_values_of_its_source(dtype: torch.dtype) -> None:
    cache = _cache(dtype, random.Random(1))
    for layer in range(SHAPE.layers):
        states = torch.randn(2, 20, 3, 8, generator=torch.Generator().manual_seed(layer))
        cache.write(layer, cache.places(torch.zeros(20, dtype=torch.long), torch.arange(20)), states[0], states[1])
    # Slot 1 shares the first page, and has a copy of the second.
    first, second = cache.page_table[0, :2].tolist()
    cache.set_pages(1, 0, [first])
    cache.copy(second, int(cache.page_table[1, 1]))
    for layer in range(SHAPE.layers):
        source, target = ([states.clone() for states in cache.read(layer, slot, 16, dtype)] for slot in (0, 1))
        assert all(map(torch.equal, source, target))


@pytest.mark.parametrize("max_model_len", [20, 24])
def test_padding_is_in_the_null_page(max_model_len: int) -> None:
    cache = KVCache(replace(SHAPE, max_model_len=max_model_len), CPU)
    for slot in range(4):
        cache.set_pages(slot, 0, range(1 + 3 * slot, 4 + 3 * slot))
    places = cache.places(torch.arange(4), torch.full((4,), max_model_len))
    assert (places < SHAPE.page_size).all()


@pytest.mark.parametrize("dtype", LARGEST_ERROR)
def test_the_shape_counts_the_bytes_that_are_allocated(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype)
    cache = KVCache(shape, CPU)
    tensors = (cache.keys, cache.values, cache.key_scales, cache.value_scales)
    assert shape.bytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("attending", ["alone", "masked", "by row"])
@pytest.mark.parametrize("max_model_len", [150, 160])
def test_logits_have_the_same_bits_on_any_pages(fp32: Checkpoint, attending: str, max_model_len: int) -> None:
    checkpoint = replace(
        fp32, max_model_len=max_model_len, attention=attention_by_sequence if attending == "by row" else None
    )
    shape = checkpoint.cache_shape(2)
    in_order, reversed_order = list(range(1, shape.pages + 1)), list(range(shape.pages, 0, -1))
    expected, found = (_logits(checkpoint, attending == "masked", pages) for pages in (in_order, reversed_order))
    assert torch.equal(found, expected)


def _logits(checkpoint: Checkpoint, captured: bool, pages: list[int]) -> torch.Tensor:
    """Return logits of a prefill in chunks and of decode steps, over a cache of NaN beside the prompt's pages."""
    runner = checkpoint.runner(checkpoint.cache_shape(2), captured)
    assert isinstance(runner, TorchRunner)
    runner.kv_cache.keys.fill_(torch.nan)
    runner.kv_cache.values.fill_(torch.nan)
    half = len(pages) // 2
    for slot in (0, 1):
        runner.set_pages(slot, 0, pages[slot * half : (slot + 1) * half])
    length = checkpoint.max_model_len
    tokens = [20 + position % 97 for position in range(length)]
    with torch.inference_mode():
        hidden = [
            runner.prefill([PromptChunk(slot, 0, tokens[: 40 + slot]) for slot in (0, 1)], every=True),
            runner.prefill([PromptChunk(slot, 40 + slot, tokens[40 + slot : 140]) for slot in (0, 1)], every=True),
        ]
        for position in range(140, length):
            rows = torch.tensor([0, 1]), torch.tensor([tokens[position]] * 2), torch.tensor([position, position])
            hidden.append(runner.decode(*rows, span=position + 1))
        return runner.logits(torch.cat(hidden))


# "by row" reads a cache in the dtype of the model.
@pytest.mark.parametrize(
    ("attending", "kv_cache_dtype"),
    [*product(("alone", "masked", "compiled"), ("auto", "int8")), ("by row", "auto")],
)
def test_stale_values_change_no_token(
    fp32: Checkpoint, attending: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A position beyond a row's own isn't read, or masked: a slot may hold NaN."""
    requests = requests_of(fp32, 6, range(1, 90), 10)
    checkpoint, parameters = fp32, {"kv_cache_dtype": kv_cache_dtype}
    if attending == "by row":
        checkpoint = replace(fp32, attention=attention_by_sequence)
    elif attending == "masked":
        # As where a decode step is a CUDA graph.
        monkeypatch.setattr(memory_plan, "unsupported_reason", lambda _: None)
        parameters["cuda_graphs"] = "on"
    elif attending == "compiled":
        needs_compiled_kernels()
        checkpoint = load("int8", kv_cache_dtype=kv_cache_dtype)
    expected, found = engine_of(checkpoint, 1, **parameters), engine_of(checkpoint, 2, **parameters)
    spoil_cache(found)
    assert completions(found, requests) == [completions(expected, [request])[0] for request in requests]
