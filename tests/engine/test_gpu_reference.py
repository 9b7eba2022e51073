"""The reference kernels against their definitions in float64, on a GPU where there is one: they have a GPU path."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn.modules import Int8Params
from engine.triton_device import DEVICE, assert_near, normal, randomness
from llama_engine.kernels.gpu import gpu_reference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("with_bias", [False, True])
def test_the_product_is_the_exact_one_rounded_once(with_bias: bool, dtype: torch.dtype) -> None:
    weight = torch.randint(-127, 128, (37, 48), device=DEVICE, generator=randomness(2), dtype=torch.int8)
    scales = torch.rand(37, device=DEVICE, generator=randomness(3)) / 127
    activations, bias = normal(5, 48, seed=1, dtype=dtype), normal(37, seed=4, dtype=dtype) if with_bias else None
    exact = activations.double() @ (weight.double() * scales.double()[:, None]).T
    expected = exact if bias is None else exact + bias.double()
    product = gpu_reference.int8_product(activations, weight, scales, bias)
    assert_near(product, expected.to(dtype))
    with torch.inference_mode():
        # As it is in a layer.
        parameter = Int8Params(weight, requires_grad=False, has_fp16_weights=False, SCB=scales)
        assert torch.equal(gpu_reference.int8_product(activations, parameter, scales, bias), product)


@pytest.mark.parametrize("group", [1, 4])
def test_the_attention_is_that_of_each_row_and_head_alone(group: int) -> None:
    lengths = (3, 20, 1)
    query = normal(3, 8, 16, seed=1, dtype=torch.float32)
    keys, values = normal(2, 3, 8 // group, 20, 16, seed=2, dtype=torch.float32)
    slots = torch.tensor((2, 0, 1), device=DEVICE)
    attended = gpu_reference.decode_attention(query, keys, values, slots, torch.tensor(lengths, device=DEVICE), 0.25)
    for row, length in enumerate(lengths):
        for head in range(8):
            place = (int(slots[row]), head // group)
            key, value = keys[place][:length], values[place][:length]
            expected = (query[row, head] @ key.T * 0.25).softmax(-1) @ value
            torch.testing.assert_close(attended[row, head], expected)
