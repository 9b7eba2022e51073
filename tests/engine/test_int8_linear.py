"""8-bit layers on a CPU: the product rounds the weights and nothing else; which layers get which product."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch
from engine.prompts import random_prompt
from llama_engine.kernels.gpu import gpu_reference
from llama_engine.kernels.gpu.gpu_kernels import STOCK, Int8Product, Kernels
from llama_engine.libraries import Int8Params, Linear8bitLt
from llama_engine.model import transformers_reader, widened_product
from llama_engine.model.int8_linear import Int8Linear, replace_int8_layers
from llama_engine.model.llama_config import read_config
from llama_engine.model.loader import EMBEDDED, Checkpoint
from llama_engine.model.model_runner import Chunk
from llama_engine.model.transformers_reader import install_kernels, load_with_transformers
from llama_engine.settings import Settings
from torch.nn import Sequential
from torch.nn.functional import kl_div, nll_loss
from transformers import LlamaForCausalLM


def _layer(outputs: int, inputs: int, bias: bool) -> Linear8bitLt:
    """Return a layer as the loader leaves it: quantized, its scales on the weight."""
    torch.manual_seed(3)
    layer = Linear8bitLt(inputs, outputs, bias=bias, has_fp16_weights=False, threshold=0.0)
    layer.weight = Int8Params(torch.randn(outputs, inputs), requires_grad=False, has_fp16_weights=False)
    # Moving a layer quantizes it.
    Sequential(layer).to("cpu")
    layer.requires_grad_(False)
    return layer


def _exact(activations: torch.Tensor, layer: Linear8bitLt) -> torch.Tensor:
    """Return the product with the dequantized weight, in float64."""
    scales = getattr(layer.weight, "SCB", None)
    assert isinstance(scales, torch.Tensor)
    product: torch.Tensor = activations.double() @ (layer.weight.data.double() * scales.double()[:, None] / 127).T
    return product if layer.bias is None else product + layer.bias.double()


def _int8_layers(model: torch.nn.Module) -> list[Linear8bitLt]:
    return [module for module in model.modules() if isinstance(module, Linear8bitLt)]


@pytest.mark.parametrize(("bias", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("block", [1, 96, 1000, widened_product.BLOCK])
def test_the_product_is_that_of_the_dequantized_weight_in_the_dtype_of_the_activations(
    monkeypatch: pytest.MonkeyPatch, block: int, rows: int, bias: bool, dtype: torch.dtype
) -> None:
    # 37 outputs of 48 inputs: blocks of one row, of two with one left over, of twenty, and one for all.
    monkeypatch.setattr(widened_product, "BLOCK", block)
    layer = _layer(37, 48, bias)
    model, activations = Sequential(layer), torch.randn(2, rows, 48).to(dtype)
    expected = _exact(activations, layer)
    replace_int8_layers(model)
    assert isinstance(model[0], Int8Linear)
    assert model[0].weight is layer.weight, "the weight has been copied"
    product = model(activations)
    assert (product.shape, product.dtype) == ((2, rows, 37), dtype)
    relative, absolute = (1e-2, 1e-2) if dtype == torch.bfloat16 else (1e-5, 1e-4)
    torch.testing.assert_close(product.double(), expected, rtol=relative, atol=absolute)


@pytest.mark.parametrize(
    ("slots", "rows", "few"),
    [(0, 64, True), (0, 65, False), (8, 64, True), (65, 65, True), (100, 100, True), (100, 101, False)],
)
def test_a_decode_step_of_any_number_of_slots_uses_the_product_for_few_rows(slots: int, rows: int, few: bool) -> None:
    called: list[str] = []

    def product(name: str) -> Int8Product:
        def run(
            activations: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            called.append(name)
            return gpu_reference.int8_product(activations, weight, scales, bias)

        return run

    layer = Int8Linear(_layer(37, 48, True), product("few rows"), product("many rows"), slots)
    # A pass is a flat list of tokens.
    assert layer(torch.randn(rows, 48)).shape == (rows, 37)
    assert called == ["few rows" if few else "many rows"]


def test_layers_that_share_a_buffer_do_not_disturb_each_other_in_and_out_of_inference_mode() -> None:
    layers = [_layer(48, 32, False), _layer(16, 48, False), _layer(64, 16, True)]
    activations = torch.randn(7, 32)
    *_, expected = accumulate(layers, _exact, initial=activations)
    model = Sequential(*layers)
    replace_int8_layers(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(activations).double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(model(activations).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("few_rows", [None, gpu_reference.int8_product])
def test_on_a_gpu_a_fused_product_replaces_the_8_bit_layers_and_stock_kernels_none(
    few_rows: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model that looks as if on a GPU.
    settings = Settings(quantization="int8", int8_threshold=0.0)
    config = read_config(EMBEDDED, str(EMBEDDED))
    model = load_with_transformers(str(EMBEDDED), config, settings, torch.device("cpu"), torch.float32)
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"), raising=False)
    chosen = Kernels(few_rows, attention=gpu_reference.decode_attention)  # type: ignore[arg-type]  # None or a product
    calls: list[tuple[object, ...]] = []

    def choose(*arguments: object) -> Kernels:
        calls.append(arguments)
        return chosen

    monkeypatch.setattr(transformers_reader, "choose_kernels", choose)
    assert install_kernels(model, "stock") == STOCK
    assert calls == []
    assert not any(isinstance(layer, Int8Linear) for layer in _int8_layers(model))
    assert install_kernels(model, "fused") == chosen
    assert {isinstance(layer, Int8Linear) for layer in _int8_layers(model)} == {few_rows is not None}
    assert config.num_key_value_heads is not None
    group, hidden, inner = config.num_attention_heads // config.num_key_value_heads, 256, config.intermediate_size
    assert config.hidden_size == hidden
    shapes = [(hidden, hidden), (hidden // group, hidden), (inner, hidden), (hidden, inner)]
    assert calls == [(torch.device("cuda"), torch.float32, hidden // config.num_attention_heads, group, shapes)]


def _log_probs(checkpoint: Checkpoint, tokens: tuple[int, ...]) -> torch.Tensor:
    """Return the log probabilities of what follows each token but the last one, [tokens - 1, vocabulary]."""
    runner = checkpoint.runner(checkpoint.cache_shape(1))
    with torch.inference_mode():
        return runner.logits(runner.prefill([Chunk(0, 0, tokens)], every=True))[:-1].log_softmax(-1)


def test_8_bits_cost_less_than_a_hundredth_in_perplexity_and_in_divergence(fp32: Checkpoint, int8: Checkpoint) -> None:
    randomness, losses, divergences = random.Random(6), [], []
    for _ in range(12):
        tokens = random_prompt(fp32.tokenizer, range(100, 300), randomness)[1]
        exact, rounded = (_log_probs(checkpoint, tokens) for checkpoint in (fp32, int8))
        divergences.append(kl_div(rounded, exact, reduction="none", log_target=True).sum(-1))
        following = torch.tensor(tokens[1:])
        losses.append(torch.stack([nll_loss(one, following, reduction="none") for one in (exact, rounded)]))
    before, after = torch.cat(losses, 1).mean(1).exp().tolist()
    assert 0 < abs(after / before - 1) < 0.01
    assert 0 < torch.cat(divergences).mean() < 0.01
