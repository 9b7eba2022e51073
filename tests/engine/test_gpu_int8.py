"""The exact INT8 product of a GPU, on CPU tensors: what it refuses, and models built with it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import load
from engine.int8_layers import random_weight
from llama_engine.checkpoint.per_channel import requantized
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError
from llama_engine.kernels.activation_terms import MAX_INPUTS
from llama_engine.kernels.gpu.elementwise import SEPARATE, choose_elementwise
from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear
from llama_engine.model.load_plan import LinearLayers, LoadPlan
from llama_engine.model.loader import LoadedModel
from llama_engine.model.model_runner import PromptChunk


def test_a_product_that_falls_back_to_floats_is_an_error() -> None:
    # In a process of its own, because pytest has warning filters of its own.
    program = (
        "import warnings; import llama_engine.kernels.gpu.exact_int8\n"
        "warnings.warn('no usable algo for shape (1, 2); falling back to fp32 matmul.', RuntimeWarning)"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert "RuntimeWarning: no usable algo for shape" in ended.stderr


def test_the_result_has_the_activations_shape_and_dtype() -> None:
    layer, rows = exact_int8_linear(random_weight(37, 48), 2), torch.randn(2, 3, 48).bfloat16()
    assert (layer(rows).shape, layer(rows).dtype) == ((2, 3, 37), torch.bfloat16)
    assert torch.equal(layer(rows), layer(rows.float()).bfloat16())


@pytest.mark.parametrize("inputs", [46, MAX_INPUTS + 4])
def test_inputs_whose_sums_are_not_exact_are_refused(inputs: int) -> None:
    with pytest.raises(CheckpointError, match=rf"^INT8 weights of 2 x {inputs} .* multiple of 4 and at most 132104$"):
        exact_int8_linear(LinearWeight(torch.zeros(2, inputs, dtype=torch.int8), torch.ones(2)), 2)


# PyTorch's compiler calls it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_model_of_these_layers_is_near_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_compiled_kernels()
    compiled = load("int8", int8_terms="2", kv_cache_dtype="float32")
    fused = choose_elementwise(torch.device("cpu"), torch.float32, 256, 6, 64, 2)
    assert fused != SEPARATE
    layers = LinearLayers(requantized, partial(exact_int8_linear, terms=2, elementwise=fused), "as on a GPU")
    monkeypatch.setattr(LoadPlan, "linear_layers", lambda plan: layers)
    with torch._dynamo.config.patch(error_on_recompile=True):
        as_on_a_gpu = load("int8", kernels="stock")
        assert as_on_a_gpu.info.product == "as on a GPU"
        expected, result = (_logits(checkpoint) for checkpoint in (compiled, as_on_a_gpu))
    torch._dynamo.reset()
    assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()


def _logits(checkpoint: LoadedModel) -> torch.Tensor:
    """Return the logits of a prefill and of two decode steps, [32, vocabulary]."""
    runner = checkpoint.runner(shape := checkpoint.cache_shape(1, "float32"))
    runner.set_pages(0, 0, range(1, shape.pages + 1))
    with torch.inference_mode():
        hidden = [runner.prefill([PromptChunk(0, 0, range(60, 90))], every=True)]
        for position, token in enumerate((90, 91), 30):
            hidden.append(
                runner.decode(torch.tensor([0]), torch.tensor([token]), torch.tensor([position]), position + 1)
            )
        return runner.logits(torch.cat(hidden))
