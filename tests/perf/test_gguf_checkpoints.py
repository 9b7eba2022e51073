"""The GGUF files of tests and benchmarks, read by the gguf package; tests/engine/test_gguf.py serves them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from models import gguf_checkpoints
from perf.checkpoint import EMBEDDED


def test_a_heads_rows_are_rotated_as_neighbours(tmp_path: Path) -> None:
    file = gguf_checkpoints.write(EMBEDDED, "bf16", tmp_path / "model.gguf")
    (keys,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.0.attn_k.weight")
    weight = load_file(EMBEDDED / "model.safetensors")["model.layers.0.self_attn.k_proj.weight"]
    # Of a head of 64 rows, llama.cpp's second is transformers' 33rd.
    rows = weight[[0, 32, 1, 33]].to(torch.bfloat16).float().numpy()
    assert np.array_equal(gguf.dequantize(keys.data, keys.tensor_type)[:4], rows)
