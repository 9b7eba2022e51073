"""The 8-bit layers of a GPU, run on a CPU: weights are rounded and activations aren't."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.nn.modules import Int8Params, Linear8bitLt
from llama_engine.kernels.gpu import gpu_reference
from llama_engine.kernels.gpu.bitsandbytes_linear import Int8Linear, replace_int8_layers
from llama_engine.kernels.gpu.gpu_kernels import STOCK, Int8Product, Kernels
from llama_engine.model import transformers_reader
from llama_engine.model.llama_config import read_config
from llama_engine.model.loader import EMBEDDED
from llama_engine.model.transformers_reader import install_kernels, load_with_transformers
from llama_engine.settings import Settings
from torch.nn import Sequential
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
def test_the_product_is_that_of_the_dequantized_weight(rows: int, bias: bool, dtype: torch.dtype) -> None:
    layer = _layer(37, 48, bias)
    model, activations = Sequential(layer), torch.randn(2, rows, 48).to(dtype)
    expected = _exact(activations, layer)
    replace_int8_layers(model, Kernels(few_rows=gpu_reference.int8_product))
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
def test_a_decode_step_uses_the_product_for_few_rows(slots: int, rows: int, few: bool) -> None:
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


@pytest.mark.parametrize("few_rows", [None, gpu_reference.int8_product])
def test_a_fused_product_replaces_the_8_bit_layers(few_rows: object, monkeypatch: pytest.MonkeyPatch) -> None:
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
