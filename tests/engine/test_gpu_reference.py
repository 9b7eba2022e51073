"""The reference of the decode attention, on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch
from engine.triton_device import DEVICE, normal
from llama_engine.kernels.gpu import gpu_reference


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
