"""The 8-bit product on a CPU: the weights are rounded, and nothing else."""

from __future__ import annotations

import pytest
import torch
from engine.engines import load
from llama_engine.kernels import reference
from llama_engine.kernels.selection import STOCK, Kernels
from llama_engine.libraries import Int8Params, Linear8bitLt
from llama_engine.model import int8_linear
from llama_engine.model import loader as loading
from llama_engine.model.int8_linear import Int8Linear, replace_int8_layers
from llama_engine.model.loader import Checkpoint, install_kernels
from transformers import LlamaForCausalLM


def _layer(outputs: int, inputs: int, bias: bool) -> Linear8bitLt:
    """Return a layer as the checkpoint's loading leaves it: quantized, its scales on the weight."""
    torch.manual_seed(3)
    layer = Linear8bitLt(inputs, outputs, bias=bias, has_fp16_weights=False, threshold=0.0)
    layer.weight = Int8Params(torch.randn(outputs, inputs), requires_grad=False, has_fp16_weights=False)
    # Moving it quantizes it.
    torch.nn.Sequential(layer).to("cpu")
    layer.requires_grad_(False)
    return layer


def _exact(layer: Linear8bitLt, activations: torch.Tensor) -> torch.Tensor:
    scales = getattr(layer.weight, "SCB", None)
    assert isinstance(scales, torch.Tensor)
    product: torch.Tensor = activations.double() @ (layer.weight.data.double() * scales.double()[:, None] / 127).T
    return product if layer.bias is None else product + layer.bias.double()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("block", [1, 96, 1000, int8_linear.BLOCK])
def test_the_product_is_not_that_of_the_dequantized_weight(
    monkeypatch: pytest.MonkeyPatch, block: int, rows: int, bias: bool
) -> None:
    # 37 outputs of 48 inputs: blocks of one row, of two with one left over, of twenty, and one for all.
    monkeypatch.setattr(int8_linear, "BLOCK", block)
    layer = _layer(37, 48, bias)
    parent = torch.nn.Sequential(layer)
    activations = torch.randn(2, rows, 48)
    expected = _exact(layer, activations)
    replace_int8_layers(parent)
    assert isinstance(parent[0], Int8Linear)
    assert parent[0].weight is layer.weight, "the weight has been copied"
    product = parent(activations)
    assert (product.shape, product.dtype) == ((2, rows, 37), torch.float32)
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-4)


def test_layers_that_share_the_scratch_spoil_each_other() -> None:
    layers = [_layer(48, 32, False), _layer(16, 48, False), _layer(64, 16, True)]
    activations = torch.randn(7, 32)
    expected = activations
    for layer in layers:
        expected = _exact(layer, expected).float()
    model = torch.nn.Sequential(*layers)
    replace_int8_layers(model)
    torch.testing.assert_close(model(activations), expected, rtol=1e-4, atol=1e-3)


def test_the_dtype_of_the_activations_is_not_kept() -> None:
    layer = _layer(8, 16, True)
    model = torch.nn.Sequential(layer)
    activations = torch.randn(3, 16).bfloat16()
    expected = _exact(layer, activations)
    replace_int8_layers(model)
    product = model(activations)
    assert product.dtype == torch.bfloat16
    torch.testing.assert_close(product.double(), expected, rtol=1e-2, atol=1e-2)


def test_activations_are_rounded_at_threshold_0_or_not_rounded_at_another(int8: Checkpoint) -> None:
    def rounding(checkpoint: Checkpoint) -> set[bool]:
        modules = checkpoint.model.modules()
        return {not isinstance(module, Int8Linear) for module in modules if isinstance(module, Linear8bitLt)}

    assert rounding(int8) == {False}
    assert "outlier threshold 0, activations not rounded;" in int8.info.describe()
    outliers = load("int8", int8_threshold="6")
    assert rounding(outliers) == {True}
    assert "outlier threshold 6; " in outliers.info.describe()


def test_fused_kernels_change_something_on_a_cpu(int8: Checkpoint) -> None:
    fused = load("int8", kernels="fused")
    assert fused.kernels == int8.kernels == STOCK
    assert fused.info == int8.info


def test_a_gpu_gets_other_kernels_than_the_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # bitsandbytes' layers at threshold 0, as a GPU has them; a CPU gets others at once.
    model = load("int8", int8_threshold="6").model
    layers = [module for module in model.modules() if isinstance(module, Linear8bitLt)]
    for layer in layers:
        layer.state.threshold = 0.0
    chosen = Kernels(few_rows=reference.int8_product, attention=reference.decode_attention)
    asked: list[tuple[object, ...]] = []

    def choose(*info: object) -> Kernels:
        asked.append(info)
        return chosen

    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(loading, "choose_kernels", choose)
    assert install_kernels(model, "stock") == STOCK
    assert asked == []
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    assert install_kernels(model, "fused") == chosen
    heads = model.config.num_attention_heads
    shared = model.config.num_key_value_heads
    assert shared is not None
    group = heads // shared
    hidden, inner = model.config.hidden_size, model.config.intermediate_size
    shapes = [(hidden, hidden), (hidden // group, hidden), (inner, hidden), (hidden, inner)]
    assert asked == [(torch.device("cuda"), torch.float32, hidden // heads, group, [*dict.fromkeys(shapes)])]
    assert sum(isinstance(module, Int8Linear) for module in model.modules()) == len(layers)


def test_a_product_that_failed_leaves_no_stock_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("int8", int8_threshold="6").model
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            module.state.threshold = 0.0
    chosen = Kernels(attention=reference.decode_attention)
    monkeypatch.setattr(LlamaForCausalLM, "device", torch.device("cuda"), raising=False)
    monkeypatch.setattr(loading, "choose_kernels", lambda *_: chosen)
    assert install_kernels(model, "fused") == chosen
    assert not any(isinstance(module, Int8Linear) for module in model.modules())


def test_a_layer_that_was_first_used_in_inference_mode_is_of_no_use_outside() -> None:
    model = torch.nn.Sequential(_layer(8, 16, False))
    replace_int8_layers(model)
    activations = torch.randn(3, 16)
    with torch.inference_mode():
        within = model(activations).clone()
    torch.testing.assert_close(model(activations), within.clone(), rtol=0, atol=0)
