"""The plain forms of the kernels, which say what the fused ones must come to, and a model that runs on them.

The forms run on a GPU where there is one, because they take another way there; the model always on the CPU: it is
compared token by token with itself, and a GPU's matrix library may add up in another order for another shape.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.engines import completions, engine_of, load
from engine.forward_passes import before_each
from engine.gpu_kernels import DEVICE, assert_near, normal, randomness
from engine.prompts import random_prompt
from engine.small_checkpoints import save_small
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.kernels import reference
from llama_engine.kernels.selection import Kernels
from llama_engine.libraries import Int8Params
from llama_engine.model.loader import Checkpoint
from llama_engine.text.tokenizer import Tokenizer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_the_plain_product_rounds_more_than_the_weights(bias: bool, dtype: torch.dtype) -> None:
    activations = normal(5, 48, seed=1, dtype=dtype)
    weight = torch.randint(-127, 128, (37, 48), device=DEVICE, generator=randomness(2), dtype=torch.int8)
    scales = torch.rand(37, device=DEVICE, generator=randomness(3)) / 127
    added = normal(37, seed=4, dtype=dtype) if bias else None
    exact = activations.double() @ (weight.double() * scales.double()[:, None]).T
    expected = exact if added is None else exact + added.double()
    assert_near(reference.int8_product(activations, weight, scales, added), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_plain_product_cannot_take_a_weight_as_its_layer_holds_it(dtype: torch.dtype) -> None:
    codes = torch.randint(-127, 128, (37, 48), device=DEVICE, generator=randomness(2), dtype=torch.int8)
    activations, scales = normal(5, 48, seed=1, dtype=dtype), torch.rand(37, device=DEVICE, generator=randomness(3))
    expected = reference.int8_product(activations, codes, scales)
    with torch.inference_mode():
        held = Int8Params(codes, requires_grad=False, has_fp16_weights=False, SCB=scales)
        assert torch.equal(reference.int8_product(activations, held, scales), expected)


@pytest.mark.parametrize("shared", [1, 4])
def test_the_plain_attention_is_not_that_of_each_row_by_itself(shared: int) -> None:
    lengths = (3, 20, 1)
    query = normal(3, 8, 16, seed=1, dtype=torch.float32)
    keys, values = normal(2, 3, 8 // shared, 20, 16, seed=2, dtype=torch.float32)
    attended = reference.decode_attention(query, keys, values, torch.tensor(lengths, device=DEVICE), 0.25)
    for row, length in enumerate(lengths):
        for head in range(8):
            key, value = keys[row, head // shared, :length], values[row, head // shared, :length]
            expected = (query[row, head] @ key.T * 0.25).softmax(-1) @ value
            torch.testing.assert_close(attended[row, head], expected)


@pytest.fixture
def small(tmp_path: Path, tokenizer: Tokenizer) -> Checkpoint:
    return load("none", model=str(save_small(tmp_path / "small", tokenizer)))


def _requests(checkpoint: Checkpoint) -> list[GenerationRequest]:
    randomness = random.Random(4)
    prompts = [random_prompt(checkpoint.tokenizer, range(1, 60), randomness)[1] for _ in range(6)]
    return [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=24, min_tokens=24) for prompt in prompts]


def test_a_model_that_attends_by_row_says_something_else(small: Checkpoint) -> None:
    requests = _requests(small)
    # Prefills of whole prompts and of chunks, steps of one to four rows.
    masked = completions(engine_of(small, 4, prefill_tokens="32"), requests)
    by_row = replace(small, kernels=Kernels(attention=reference.decode_attention))
    assert completions(engine_of(by_row, 4, prefill_tokens="32"), requests) == masked


def test_a_row_that_is_attended_by_itself_sees_the_rubbish_of_a_former_one(small: Checkpoint) -> None:
    requests = _requests(small)
    by_row = replace(small, kernels=Kernels(attention=reference.decode_attention))
    fresh = completions(engine_of(by_row, 4), requests)
    engine = engine_of(by_row, 4)

    def leave_rubbish(number: int, cache: object) -> None:
        if number == 0:
            for layer in cache.slot_layers:  # type: ignore[attr-defined]  # a KVCache
                layer.keys.fill_(1e4)
                layer.values.fill_(torch.nan)

    with before_each(by_row, leave_rubbish):
        assert completions(engine, requests) == fresh


def test_a_step_of_every_kind_cannot_be_made_before_the_first_row(small: Checkpoint) -> None:
    by_row = replace(small, kernels=Kernels(attention=reference.decode_attention))
    for checkpoint, slots in ((small, 1), (by_row, 20)):
        engine = engine_of(checkpoint, slots)
        expected = completions(engine_of(checkpoint, slots), _requests(small))
        with torch.inference_mode():
            engine._model.rehearse()
        assert completions(engine, _requests(small)) == expected
