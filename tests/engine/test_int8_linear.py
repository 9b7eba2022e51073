"""8-bit layers on a CPU: the product rounds the weights and nothing else; which layers get which product."""

from __future__ import annotations

import random
from itertools import accumulate

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
from torch.nn.functional import cross_entropy, kl_div
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
@pytest.mark.parametrize("block", [1, 96, 1000, int8_linear.BLOCK])
def test_the_product_is_that_of_the_dequantized_weight_in_the_dtype_of_the_activations(
    monkeypatch: pytest.MonkeyPatch, block: int, rows: int, bias: bool, dtype: torch.dtype
) -> None:
    # 37 outputs of 48 inputs: blocks of one row, of two with one left over, of twenty, and one for all.
    monkeypatch.setattr(int8_linear, "BLOCK", block)
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


def test_layers_that_share_a_buffer_do_not_disturb_each_other_in_and_out_of_inference_mode() -> None:
    layers = [_layer(48, 32, False), _layer(16, 48, False), _layer(64, 16, True)]
    activations = torch.randn(7, 32)
    *_, expected = accumulate(layers, _exact, initial=activations)
    model = Sequential(*layers)
    replace_int8_layers(model)
    with torch.inference_mode():
        torch.testing.assert_close(model(activations).double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(model(activations).double(), expected, rtol=1e-4, atol=1e-3)


def test_activations_are_rounded_only_at_thresholds_above_0(int8: Checkpoint) -> None:
    for checkpoint, rounded, described in (
        (int8, False, "outlier threshold 0, activations not rounded;"),
        (load("int8", int8_threshold="6"), True, "outlier threshold 6; "),
    ):
        assert {not isinstance(layer, Int8Linear) for layer in _int8_layers(checkpoint.model)} == {rounded}
        assert described in checkpoint.info.describe()


def test_the_setting_kernels_changes_nothing_on_a_cpu(int8: Checkpoint) -> None:
    fused = load("int8", kernels="fused")
    assert fused.kernels == int8.kernels == STOCK
    assert fused.info == int8.info


@pytest.mark.parametrize("few_rows", [None, reference.int8_product])
def test_on_a_gpu_a_fused_product_replaces_the_8_bit_layers_and_stock_kernels_none(
    few_rows: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A model that looks as if on a GPU: with bitsandbytes' layers at threshold 0, which a CPU replaces at once.
    model = load("int8", int8_threshold="6").model
    for layer in _int8_layers(model):
        layer.state.threshold = 0.0
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"), raising=False)
    chosen = Kernels(few_rows, attention=reference.decode_attention)  # type: ignore[arg-type]  # None or a product
    calls: list[tuple[object, ...]] = []

    def choose(*arguments: object) -> Kernels:
        calls.append(arguments)
        return chosen

    monkeypatch.setattr(loader, "choose_kernels", choose)
    assert install_kernels(model, "stock") == STOCK
    assert calls == []
    assert not any(isinstance(layer, Int8Linear) for layer in _int8_layers(model))
    assert install_kernels(model, "fused") == chosen
    assert {isinstance(layer, Int8Linear) for layer in _int8_layers(model)} == {few_rows is not None}
    config = model.config
    assert config.num_key_value_heads is not None
    group, hidden, inner = config.num_attention_heads // config.num_key_value_heads, 256, config.intermediate_size
    assert config.hidden_size == hidden
    shapes = [(hidden, hidden), (hidden // group, hidden), (inner, hidden), (hidden, inner)]
    assert calls == [(torch.device("cuda"), torch.float32, hidden // config.num_attention_heads, group, shapes)]


def test_8_bits_cost_less_than_a_hundredth_in_perplexity_and_in_divergence(fp32: Checkpoint, int8: Checkpoint) -> None:
    randomness, losses, divergences = random.Random(6), [], []
    for _ in range(12):
        tokens = torch.tensor(random_prompt(fp32.tokenizer, range(100, 300), randomness)[1])
        with torch.inference_mode():
            both = [checkpoint.model(input_ids=tokens[None]).logits[0, :-1] for checkpoint in (fp32, int8)]
        exact, rounded = (logits.log_softmax(-1) for logits in both)
        divergences.append(kl_div(rounded, exact, reduction="none", log_target=True).sum(-1))
        losses.append(torch.stack([cross_entropy(logits, tokens[1:], reduction="none") for logits in both]))
    before, after = torch.cat(losses, 1).mean(1).exp().tolist()
    assert 0 < abs(after / before - 1) < 0.01
    assert 0 < torch.cat(divergences).mean() < 0.01
