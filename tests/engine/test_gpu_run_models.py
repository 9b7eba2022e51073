"""Random Llamas created on the device, in each precision and in any order."""

from __future__ import annotations

import pytest
import torch
from engine.engines import completions, engine_of, tokens_in
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.libraries import Linear8bitLt
from llama_engine.model.loader import Checkpoint

from perf.gpu.models import FP32, INT8, INT8_OUTLIERS, Precision, RandomLlama, in_8_bits
from perf.gpu.options import TINY

CPU = torch.device("cpu")


def _tokens(checkpoint: Checkpoint) -> list[int]:
    request = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=6)
    return tokens_in(completions(engine_of(checkpoint, 1), [request])[0].text)


def _loaded(checkpoint: Checkpoint) -> tuple[str, float | None, bool]:
    info = checkpoint.info
    return "int8" if "int8" in info.linears else "plain", info.threshold, info.rounds_activations


def test_the_model_takes_each_requested_precision() -> None:
    llama = RandomLlama(TINY, CPU)
    for precision, expected in (
        (FP32, ("plain", None, False)),
        # On a CPU threshold 0 has a layer of the engine's own, which rounds no activations.
        (INT8, ("int8", 0.0, False)),
        (INT8_OUTLIERS, ("int8", 6.0, True)),
        (FP32, ("plain", None, False)),
    ):
        assert _loaded(llama.at(precision)) == expected
    assert llama.at(INT8).info.linears == {"int8": 7 * TINY.layers, "float32": 1}


def test_stock_layers_are_bitsandbytes_and_others_the_engines() -> None:
    llama = RandomLlama(TINY, CPU)
    for stock in (True, False, True):
        kinds = {type(module) for module in llama.at(INT8, stock).model.model.modules()}
        assert (Linear8bitLt in kinds) is stock


@pytest.mark.parametrize("precision", [FP32, INT8, INT8_OUTLIERS])
def test_two_models_of_one_shape_are_equal(precision: Precision) -> None:
    assert _tokens(RandomLlama(TINY, CPU).at(precision)) == _tokens(RandomLlama(TINY, CPU).at(precision))


def test_an_8_bit_layer_approximates_its_matrix() -> None:
    weight = torch.randn(48, 32)
    rows = torch.randn(5, 32)
    exact = rows @ weight.T
    for threshold in (0.0, 6.0):
        assert ((in_8_bits(weight, threshold)(rows) - exact).norm() / exact.norm()).item() < 0.03
