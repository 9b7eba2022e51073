"""The exact INT8 product of a GPU, on CPU tensors: what it refuses, and models built with it."""

from __future__ import annotations

import warnings
from functools import partial
from importlib.util import find_spec, module_from_spec

import pytest
import torch
from engine.engines import load, needs_compiled_kernels
from engine.int8_layers import random_weight
from engine.logits import logits_of
from llama_engine.checkpoint.per_channel import requantized
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError
from llama_engine.kernels.activation_terms import MAX_INPUTS
from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear
from llama_engine.model.load_plan import LinearLayers, LoadPlan


def test_a_product_that_falls_back_to_floats_is_an_error() -> None:
    spec = find_spec("llama_engine.kernels.gpu.exact_int8")
    assert spec is not None
    assert spec.loader is not None
    with warnings.catch_warnings():
        # Instead of pytest's filters.
        warnings.resetwarnings()
        spec.loader.exec_module(module_from_spec(spec))
        with pytest.raises(RuntimeWarning, match="no usable algo"):
            warnings.warn("no usable algo for shape (1, 2); falling back to fp32 matmul.", RuntimeWarning, stacklevel=1)


def test_the_result_has_the_activations_shape_and_dtype() -> None:
    layer, rows = exact_int8_linear(random_weight(37, 48), 2), torch.randn(2, 3, 48).bfloat16()
    assert (layer(rows).shape, layer(rows).dtype) == ((2, 3, 37), torch.bfloat16)
    assert torch.equal(layer(rows), layer(rows.float()).bfloat16())


@pytest.mark.parametrize("inputs", [46, MAX_INPUTS + 4])
def test_inputs_whose_sums_are_not_exact_are_refused(inputs: int) -> None:
    with pytest.raises(CheckpointError, match=rf"^INT8 weights of 2 x {inputs} .* multiple of 4 and at most 132104$"):
        exact_int8_linear(LinearWeight(torch.zeros(2, inputs, dtype=torch.int8), torch.ones(2)), 2)


def test_a_model_of_these_layers_is_near_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiled_kernels()
    compiled = load("int8", int8_terms="2", kv_cache_dtype="float32")
    layers = LinearLayers(requantized, partial(exact_int8_linear, terms=2), "as on a GPU")
    monkeypatch.setattr(LoadPlan, "linear_layers", lambda plan: layers)
    as_on_a_gpu = load("int8", kernels="stock")
    assert as_on_a_gpu.info.product == "as on a GPU"
    expected, result = (
        logits_of(checkpoint, range(60, 92), 30, kv_cache_dtype="float32") for checkpoint in (compiled, as_on_a_gpu)
    )
    assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()
