"""8-bit layers on a CPU: the product rounds the weights and nothing else; its cost in accuracy."""

from __future__ import annotations

import math
import random

import pytest
import torch
from engine.engines import load
from engine.prompts import random_prompt
from llama_engine.kernels import reference
from llama_engine.kernels.selection import STOCK, Kernels
from llama_engine.libraries import Int8Params, Linear8bitLt
from llama_engine.model import int8_linear, loader
from llama_engine.model.int8_linear import Int8Linear, replace_int8_layers
from llama_engine.model.loader import Checkpoint, install_kernels
from torch.nn import Sequential
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM


def layer_of(outputs: int, inputs: int, bias: bool) -> Linear8bitLt:
    """Return a layer as the loader leaves it: quantized, its scales on the weight."""
    torch.manual_seed(3)
    layer = Linear8bitLt(inputs, outputs, bias=bias, has_fp16_weights=False, threshold=0.0)
    layer.weight = Int8Params(torch.randn(outputs, inputs), requires_grad=False, has_fp16_weights=False)
    # Moving a layer quantizes it.
    Sequential(layer).to("cpu")
    layer.requires_grad_(False)
    return layer


def exact_product(layer: Linear8bitLt, activations: torch.Tensor) -> torch.Tensor:
    scales = getattr(layer.weight, "SCB", None)
    assert isinstance(scales, torch.Tensor)
    product: torch.Tensor = activations.double() @ (layer.weight.data.double() * scales.double()[:, None] / 127).T
    return product if layer.bias is None else product + layer.bias.double()


def int8_layers(model: torch.nn.Module) -> list[Linear8bitLt]:
    return [module for module in model.modules() if isinstance(module, Linear8bitLt)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("block", [1, 96, 1000, int8_linear.BLOCK])
def test_the_product_is_that_of_the_dequantized_weight(
    monkeypatch: pytest.MonkeyPatch, block: int, rows: int, bias: bool
) -> None:
    # 37 outputs of 48 inputs: blocks of one row, of two with one left over, of twenty, and one for all.
    monkeypatch.setattr(int8_linear, "BLOCK", block)
    layer = layer_of(37, 48, bias)
    model = Sequential(layer)
    activations = torch.randn(2, rows, 48)
    expected = exact_product(layer, activations)
    replace_int8_layers(model)
    assert isinstance(model[0], Int8Linear)
    assert model[0].weight is layer.weight, "the weight has been copied"
    product = model(activations)
    assert (product.shape, product.dtype) == ((2, rows, 37), torch.float32)
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-4)


def test_layers_that_share_a_buffer_do_not_disturb_each_other() -> None:
    layers = [layer_of(48, 32, False), layer_of(16, 48, False), layer_of(64, 16, True)]
    activations = torch.randn(7, 32)
    expected = activations
    for layer in layers:
        expected = exact_product(layer, expected).float()
    model = Sequential(*layers)
    replace_int8_layers(model)
    torch.testing.assert_close(model(activations), expected, rtol=1e-4, atol=1e-3)


def test_the_product_keeps_the_dtype_of_the_activations() -> None:
    layer = layer_of(8, 16, True)
    model = Sequential(layer)
    activations = torch.randn(3, 16).bfloat16()
    expected = exact_product(layer, activations)
    replace_int8_layers(model)
    product = model(activations)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), expected, rtol=1e-2, atol=1e-2)


def test_a_layer_first_used_in_inference_mode_works_outside_of_it() -> None:
    model = Sequential(layer_of(8, 16, False))
    replace_int8_layers(model)
    activations = torch.randn(3, 16)
    with torch.inference_mode():
        inside = model(activations).clone()
    torch.testing.assert_close(model(activations), inside.clone(), rtol=0, atol=0)


def test_activations_are_rounded_only_at_thresholds_above_0(int8: Checkpoint) -> None:
    outliers = load("int8", int8_threshold="6")
    for checkpoint, rounded, described in (
        (int8, False, "outlier threshold 0, activations not rounded;"),
        (outliers, True, "outlier threshold 6; "),
    ):
        assert {not isinstance(layer, Int8Linear) for layer in int8_layers(checkpoint.model)} == {rounded}
        assert described in checkpoint.info.describe()


def test_the_setting_kernels_changes_nothing_on_a_cpu(int8: Checkpoint) -> None:
    fused = load("int8", kernels="fused")
    assert fused.kernels == int8.kernels == STOCK
    assert fused.info == int8.info


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> LlamaForCausalLM:
    """A model that looks as if on a GPU: with bitsandbytes' layers at threshold 0, which a CPU replaces at once."""
    model = load("int8", int8_threshold="6").model
    for layer in int8_layers(model):
        layer.state.threshold = 0.0
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"), raising=False)
    return model


def test_fused_kernels_replace_the_8_bit_layers_on_a_gpu_and_stock_ones_none(
    on_gpu: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Kernels(few_rows=reference.int8_product, attention=reference.decode_attention)
    calls: list[tuple[object, ...]] = []

    def choose(*arguments: object) -> Kernels:
        calls.append(arguments)
        return chosen

    monkeypatch.setattr(loader, "choose_kernels", choose)
    assert install_kernels(on_gpu, "stock") == STOCK
    assert calls == []
    assert not any(isinstance(layer, Int8Linear) for layer in int8_layers(on_gpu))
    assert install_kernels(on_gpu, "fused") == chosen
    assert all(isinstance(layer, Int8Linear) for layer in int8_layers(on_gpu))
    config = on_gpu.config
    assert config.num_key_value_heads is not None
    group = config.num_attention_heads // config.num_key_value_heads
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = dict.fromkeys([(hidden, hidden), (hidden // group, hidden), (inner, hidden), (hidden, inner)])
    head_dim = hidden // config.num_attention_heads
    assert calls == [(torch.device("cuda"), torch.float32, head_dim, group, [*shapes])]


def test_without_a_fused_product_a_gpu_keeps_the_stock_layers(
    on_gpu: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = Kernels(attention=reference.decode_attention)
    monkeypatch.setattr(loader, "choose_kernels", lambda *_: chosen)
    assert install_kernels(on_gpu, "fused") == chosen
    assert not any(isinstance(layer, Int8Linear) for layer in int8_layers(on_gpu))


def test_8_bits_cost_less_than_a_hundredth_in_perplexity_and_in_divergence(fp32: Checkpoint, int8: Checkpoint) -> None:
    randomness = random.Random(6)
    losses, divergences, distances = [], [], []
    for _ in range(12):
        tokens = torch.tensor(random_prompt(fp32.tokenizer, range(100, 300), randomness)[1])
        with torch.inference_mode():
            exact, rounded = (
                checkpoint.model(input_ids=tokens[None]).logits[0].float().log_softmax(-1)
                for checkpoint in (fp32, int8)
            )
        losses.append([cross_entropy(logits[:-1], tokens[1:], reduction="none") for logits in (exact, rounded)])
        divergences.append((exact.exp() * (exact - rounded)).sum(-1))
        distances.append((exact - rounded).std(-1) / exact.std(-1))
    before, after = (math.exp(torch.cat(loss).mean().item()) for loss in zip(*losses, strict=True))
    divergence, distance = torch.cat(divergences), torch.cat(distances)
    print(f"perplexity {before:.3f} in FP32, {after:.3f} in INT8; KL mean {divergence.mean():.5f} nats")
    assert abs(after / before - 1) < 0.01
    assert divergence.mean() < 0.01
    assert distance.mean() < 0.05
    assert distance.min() > 0, "INT8 is bit-identical to FP32: it is not in use"
