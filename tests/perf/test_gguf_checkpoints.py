"""The GGUF files of tests and benchmarks, read by the gguf package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models import gguf_checkpoints
from perf.checkpoint import EMBEDDED

ERRORS = {"bf16": 0.002, "q4_k_m": 0.09}
"""Largest error of a matrix, over its own norm."""


@pytest.mark.parametrize("name", ERRORS)
def test_a_gguf_reader_finds_the_weights(name: str, tmp_path: Path) -> None:
    file = gguf_checkpoints.write(EMBEDDED, name, tmp_path / "model.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    saved = load_file(EMBEDDED / "model.safetensors")
    assert len(tensors) == len(saved) + 1
    down = tensors["blk.2.ffn_down.weight"]
    weight = saved["model.layers.2.mlp.down_proj.weight"].numpy()
    difference = gguf.dequantize(down.data, down.tensor_type) - weight
    assert np.linalg.norm(difference) < ERRORS[name] * np.linalg.norm(weight)
    # RoPE's: the fastest dimensions as they are, the slowest four times slower.
    divisors = tensors["rope_freqs.weight"].data
    assert (divisors[0], divisors[-1]) == (1, 4)


def test_a_heads_rows_are_rotated_as_neighbours(tmp_path: Path) -> None:
    file = gguf_checkpoints.write(EMBEDDED, "bf16", tmp_path / "model.gguf")
    (keys,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.attn_k.weight")
    weight = load_file(EMBEDDED / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    # Of a head of 64 rows, llama.cpp's second is transformers' 33rd.
    rows = weight[[0, 32, 1, 33]].to(torch.bfloat16).float().numpy()
    assert np.array_equal(gguf.dequantize(keys.data, keys.tensor_type)[:4], rows)
