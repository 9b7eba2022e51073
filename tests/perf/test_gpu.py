"""`make bench-gpu`: the checks of a device, on the CPU; its requests have the length it reports."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from llama_engine.kernels.gpu.elementwise import SEPARATE, Elementwise, quantize
from llama_engine.model.loader import load_checkpoint
from llama_engine.settings import Settings
from transformers import LlamaConfig

from perf import gpu_checks
from perf.gpu_checks import exactness, mixes, products

CPU = torch.device("cpu")
SHAPE = LlamaConfig(hidden_size=64, intermediate_size=96, num_attention_heads=4, vocab_size=80)


def test_greedy_fp32_tokens_are_generates() -> None:
    assert exactness(CPU, amount=2, tokens=12) == {"requests": 2, "tokens": 24, "different": 0}


def _rough(rows: torch.Tensor, terms: int) -> tuple[torch.Tensor, torch.Tensor]:
    quantized, scale = quantize(rows, terms)
    return quantized, scale * 1.001


@pytest.mark.parametrize(("function", "right"), [(quantize, True), (_rough, False)])
def test_products_are_compared_with_those_of_the_cpu(
    function: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]], right: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_checks, "choose_elementwise", lambda *_: Elementwise(function))
    result = products(CPU, SHAPE, 2)
    assert result["values"] == (1 + 32 + 300) * (3 * 64 + 2 * 96 + 64 + 80)
    assert (result["different"] == 0) == right
    assert result["fused"] == (Elementwise(function) != SEPARATE)


def test_int8_requests_are_the_same_in_random_mixes() -> None:
    settings = Settings(max_model_len=128)
    result = mixes(load_checkpoint(settings, CPU), settings, 1, tokens=2)
    assert (result["different"], result["different_tokens"]) == (0, 0)
    assert result["requests"]
