"""The reference kernels against their definitions in float64, and a model that decodes with them.

The functions run on a GPU where there is one, because they have a GPU path; the model always on the CPU: it is
compared token by token, and a GPU's matrix library may add up in another order for another shape.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.engines import completions, engine_of, load
from engine.forward_passes import before_each
from engine.prompts import random_prompt
from engine.small_checkpoints import save_small
from engine.triton_device import DEVICE, assert_near, normal, randomness
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.kernels import reference
from llama_engine.kernels.selection import Kernels
from llama_engine.libraries import Int8Params
from llama_engine.model.loader import Checkpoint
from llama_engine.text.tokenizer import Tokenizer

all_dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])


def weight_and_scales() -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(-127, 128, (37, 48), device=DEVICE, generator=randomness(2), dtype=torch.int8)
    return weight, torch.rand(37, device=DEVICE, generator=randomness(3)) / 127


@all_dtypes
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_the_exact_one_rounded_once(with_bias: bool, dtype: torch.dtype) -> None:
    activations, (weight, scales) = normal(5, 48, seed=1, dtype=dtype), weight_and_scales()
    bias = normal(37, seed=4, dtype=dtype) if with_bias else None
    exact = activations.double() @ (weight.double() * scales.double()[:, None]).T
    expected = exact if bias is None else exact + bias.double()
    assert_near(reference.int8_product(activations, weight, scales, bias), expected.to(dtype))


@all_dtypes
def test_the_product_takes_the_weight_parameter_of_a_layer(dtype: torch.dtype) -> None:
    activations, (weight, scales) = normal(5, 48, seed=1, dtype=dtype), weight_and_scales()
    expected = reference.int8_product(activations, weight, scales)
    with torch.inference_mode():
        parameter = Int8Params(weight, requires_grad=False, has_fp16_weights=False, SCB=scales)
        assert torch.equal(reference.int8_product(activations, parameter, scales), expected)


@pytest.mark.parametrize("group", [1, 4])
def test_the_attention_is_that_of_each_row_and_head_alone(group: int) -> None:
    lengths = (3, 20, 1)
    query = normal(3, 8, 16, seed=1, dtype=torch.float32)
    keys, values = normal(2, 3, 8 // group, 20, 16, seed=2, dtype=torch.float32)
    attended = reference.decode_attention(query, keys, values, torch.tensor(lengths, device=DEVICE), 0.25)
    for row, length in enumerate(lengths):
        for head in range(8):
            key, value = keys[row, head // group, :length], values[row, head // group, :length]
            expected = (query[row, head] @ key.T * 0.25).softmax(-1) @ value
            torch.testing.assert_close(attended[row, head], expected)


@pytest.fixture
def masked(tmp_path: Path, tokenizer: Tokenizer) -> Checkpoint:
    """A small checkpoint with stock attention, behind a mask."""
    return load("none", model=str(save_small(tmp_path / "small", tokenizer)))


@pytest.fixture
def by_row(masked: Checkpoint) -> Checkpoint:
    """The same checkpoint with attention over each row's own length."""
    return replace(masked, kernels=Kernels(attention=reference.decode_attention))


@pytest.fixture
def requests(tokenizer: Tokenizer) -> list[GenerationRequest]:
    source = random.Random(11)
    prompts = [random_prompt(tokenizer, range(1, 60), source)[1] for _ in range(6)]
    return [GenerationRequest(prompt="", prompt_tokens=prompt, max_tokens=24, min_tokens=24) for prompt in prompts]


def test_attention_by_row_generates_the_same_tokens_as_with_a_mask(
    masked: Checkpoint, by_row: Checkpoint, requests: list[GenerationRequest]
) -> None:
    # Prefills of whole prompts and of chunks, steps of one to four rows.
    expected = completions(engine_of(masked, 4, prefill_tokens="32"), requests)
    assert completions(engine_of(by_row, 4, prefill_tokens="32"), requests) == expected


def test_attention_by_row_ignores_stale_cache_entries(by_row: Checkpoint, requests: list[GenerationRequest]) -> None:
    fresh = completions(engine_of(by_row, 4), requests)
    engine = engine_of(by_row, 4)

    def fill_with_garbage(number: int, cache: object) -> None:
        if number == 0:
            for layer in cache.slot_layers:  # type: ignore[attr-defined]  # a KVCache
                layer.keys.fill_(1e4)
                layer.values.fill_(torch.nan)

    with before_each(by_row, fill_with_garbage):
        assert completions(engine, requests) == fresh


@pytest.mark.parametrize(("checkpoint", "slots"), [("masked", 1), ("by_row", 20)])
def test_warming_up_changes_no_token(
    checkpoint: str, slots: int, requests: list[GenerationRequest], request: pytest.FixtureRequest
) -> None:
    loaded: Checkpoint = request.getfixturevalue(checkpoint)
    engine = engine_of(loaded, slots)
    with torch.inference_mode():
        engine._model.warm_up()
    assert completions(engine, requests) == completions(engine_of(loaded, slots), requests)
