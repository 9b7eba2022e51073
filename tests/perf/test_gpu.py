"""`make bench-gpu`: the checks of a device, on the CPU; its requests have the length it reports."""

from __future__ import annotations

import torch
from llama_engine.engine.engine import Engine
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
from transformers import LlamaConfig

from perf import gpu
from perf.checkpoint import EMBEDDED
from perf.gpu_checks import exactness, mixes, products

CPU = torch.device("cpu")
SHAPE = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=80)


def test_greedy_fp32_tokens_are_generates() -> None:
    assert exactness(CPU, amount=2, tokens=12) == {"requests": 2, "tokens": 24, "different": 0}


def test_products_are_those_of_the_cpu() -> None:
    result = products(CPU, SHAPE, 2)
    assert (result["values"], result["different"]) == ((1 + 32 + 300) * (3 * 64 + 2 * 96 + 64 + 80), 0)


def test_int8_requests_are_the_same_in_random_mixes() -> None:
    settings = Settings(model=str(EMBEDDED), max_model_len=128)
    result = mixes(load_checkpoint(settings, CPU), settings, 1, tokens=2)
    assert (result["different"], result["different_tokens"]) == (0, 0)
    assert result["requests"]


def test_a_load_is_served_in_flight_and_in_batches() -> None:
    settings = Settings(model=str(EMBEDDED), max_model_len=128)
    checkpoint = load_checkpoint(settings, CPU)
    for mode in ("in flight", "batched"):
        result = gpu.serving(Engine(checkpoint, settings, gpu.MODES[mode]), checkpoint, mode, "equal", 2)
        assert (result["requests"], result["peak_mib"]) == (32, None)
        assert isinstance(result["p50_s"], float)
