"""The setting kv_cache_dtype: what is allocated, and how near the logits stay to those of a float32 cache."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import cache_tensors, completions, engine_of, load
from engine.prompts import requests_of
from llama_engine.engine.engine import Engine
from llama_engine.model.cpu_runner import CpuRunner
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import PromptChunk
from llama_engine.model.torch_runner import TorchRunner

SETTINGS = ["auto", "float32", "bfloat16", "int8"]

AUTO = {"auto": torch.bfloat16, "stock": torch.float32}
"""What `auto` selects, by the setting `kernels`."""

BOUNDS = {"bfloat16": 2e-2, "int8": 2e-2}
"""Largest difference from the logits with a float32 cache, relative to the largest."""


@cache
def _checkpoint(kernels: str, kv_cache_dtype: str) -> Checkpoint:
    # Two terms, so that the cache alone changes the logits by more than a little.
    checkpoint = load("int8", kernels=kernels, kv_cache_dtype=kv_cache_dtype, int8_terms="2")
    return replace(checkpoint, max_model_len=100)


def _engine(kernels: str, kv_cache_dtype: str) -> Engine:
    if kernels == "auto":
        needs_compiled_kernels()
    engine = engine_of(_checkpoint(kernels, kv_cache_dtype), 3, kv_cache_dtype=kv_cache_dtype)
    assert isinstance(engine._model, CpuRunner if kernels == "auto" else TorchRunner)
    return engine


def _logits(engine: Engine) -> torch.Tensor:
    """Return logits of a prefill in two chunks and of a decode step, [3, vocabulary]."""
    tokens = list(range(60, 150))
    engine._model.set_pages(1, 0, range(1, 8))
    with torch.inference_mode():
        passes = [
            engine._model.prefill([PromptChunk(1, 0, tokens[:50])]),
            engine._model.prefill([PromptChunk(1, 50, tokens[50:])]),
        ]
        passes.append(engine._model.decode(torch.tensor([1]), torch.tensor([7]), torch.tensor([90]), 91))
        return engine._model.logits(torch.cat(passes))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kernels", AUTO)
def test_the_cache_has_the_dtype_of_the_setting(kernels: str, setting: str) -> None:
    engine = _engine(kernels, setting)
    expected = AUTO[kernels] if setting == "auto" else getattr(torch, setting)
    assert engine.plan.shape.dtype == expected
    assert engine.info_labels()["kv_cache_dtype"] == str(expected).removeprefix("torch.")
    tensors = cache_tensors(engine)
    # Keys and values, and in INT8 their scales.
    assert {tensor.dtype for tensor in tensors} == ({expected, torch.float32} if setting == "int8" else {expected})
    assert engine.plan.cache == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("setting", BOUNDS)
@pytest.mark.parametrize("kernels", AUTO)
def test_a_smaller_cache_moves_the_logits_by_roundings(kernels: str, setting: str) -> None:
    engine = _engine(kernels, setting)
    expected = _logits(_engine(kernels, "float32"))
    error = ((_logits(engine) - expected).abs().max() / expected.abs().max()).item()
    assert 0 < error <= BOUNDS[setting]
    requests = requests_of(_checkpoint(kernels, setting), 5)
    assert [completion.num_output_tokens for completion in completions(engine, requests)] == [8] * 5
