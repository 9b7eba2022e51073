"""The KV cache: nothing of a former sequence reaches the next one, and the dtypes of the setting."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from engine.engines import (
    attention_by_sequence,
    cache_tensors,
    completions,
    engine_of,
    load,
    needs_compiled_kernels,
    spoil_cache,
)
from engine.logits import logits_of
from engine.prompts import requests_of
from llama_engine.engine import memory_plan
from llama_engine.model.cpu_runner import CpuRunner
from llama_engine.model.loader import LoadedModel
from llama_engine.model.torch_runner import TorchRunner


# "by row" reads a cache in the dtype of the model.
@pytest.mark.parametrize(
    ("attending", "kv_cache_dtype"),
    [("alone", "auto"), ("masked", "int8"), ("compiled", "auto"), ("compiled", "int8"), ("by row", "auto")],
)
def test_stale_values_change_no_token(
    fp32: LoadedModel, attending: str, kv_cache_dtype: str, monkeypatch: pytest.MonkeyPatch
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


AUTO = {"auto": torch.bfloat16, "stock": torch.float32}
"""The dtype that `auto` selects, by the setting `kernels`."""
each_kernels = pytest.mark.parametrize("kernels", AUTO)


@cache
def _checkpoint(kernels: str, kv_cache_dtype: str) -> LoadedModel:
    if kernels == "auto":
        needs_compiled_kernels()
    # Two terms, so that the cache alone changes the logits by more than a little.
    checkpoint = load("int8", kernels=kernels, kv_cache_dtype=kv_cache_dtype, int8_terms="2")
    return replace(checkpoint, max_model_len=100)


@each_kernels
@pytest.mark.parametrize("setting", ["auto", "float32", "bfloat16", "int8"])
def test_the_cache_has_the_dtype_of_the_setting(kernels: str, setting: str) -> None:
    engine = engine_of(_checkpoint(kernels, setting), 3, kv_cache_dtype=setting)
    assert isinstance(engine._model, CpuRunner if kernels == "auto" else TorchRunner)
    expected = AUTO[kernels] if setting == "auto" else getattr(torch, setting)
    assert engine.plan.shape.dtype == expected
    assert engine.description.labels["kv_cache_dtype"] == str(expected).removeprefix("torch.")
    tensors = cache_tensors(engine)
    # Keys and values, and in INT8 their scales.
    assert {tensor.dtype for tensor in tensors} == ({expected, torch.float32} if setting == "int8" else {expected})
    assert engine.plan.cache == sum(tensor.nbytes for tensor in tensors)


@each_kernels
@pytest.mark.parametrize("setting", ["bfloat16", "int8"])
def test_a_smaller_cache_moves_the_logits_by_roundings(kernels: str, setting: str) -> None:
    result, expected = (
        logits_of(_checkpoint(kernels, dtype), range(60, 151), 50, 90, kv_cache_dtype=dtype)
        for dtype in (setting, "float32")
    )
    assert 0 < (result - expected).abs().max() <= 2e-2 * expected.abs().max()
