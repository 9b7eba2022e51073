"""The exact INT8 product of a GPU, on CPU tensors: the bits of the CPU's kernels, and models built with it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from bitsandbytes.functional import int8_linear_matmul
from engine.compiled_kernels import needs_compiled_kernels
from engine.engines import load
from engine.int8_layers import SHAPES, random_rows, random_weight
from llama_engine.checkpoint.per_channel import requantized
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError
from llama_engine.kernels.activation_terms import ONE_TERM, TWO_TERMS
from llama_engine.kernels.cpu import cpu_reference
from llama_engine.kernels.gpu import exact_int8
from llama_engine.kernels.gpu.elementwise import SEPARATE, choose_elementwise
from llama_engine.kernels.gpu.exact_int8 import MAX_INPUTS, exact_int8_linear
from llama_engine.model.load_plan import LinearLayers, LoadPlan
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_runner import PromptChunk

EXACT_SHAPES = [(outputs, inputs) for outputs, inputs in SHAPES if inputs % 4 == 0]
each_shape = pytest.mark.parametrize(("outputs", "inputs"), EXACT_SHAPES)
each_terms = pytest.mark.parametrize("terms", [1, 2])


@each_shape
@each_terms
def test_a_product_has_the_bits_of_the_cpus_kernels(outputs: int, inputs: int, terms: int) -> None:
    weight, rows = random_weight(outputs, inputs, bias=True), random_rows(40, inputs)
    assert torch.equal(
        exact_int8_linear(weight, terms)(rows), cpu_reference.linear(rows, weight, (ONE_TERM, TWO_TERMS)[terms - 1])
    )


@pytest.mark.parametrize("outputs", [36, 37, 39])
def test_outputs_of_a_product_are_padded_to_a_multiple_of_four(outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []

    def matmul(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        shapes.append(tuple(weight.shape))
        sums: torch.Tensor = int8_linear_matmul(rows, weight)
        return sums

    monkeypatch.setattr(exact_int8, "int8_linear_matmul", matmul)
    weight, rows = random_weight(outputs, 48, bias=True), random_rows(9, 48)
    assert torch.equal(exact_int8_linear(weight, 2)(rows), cpu_reference.linear(rows, weight, TWO_TERMS))
    assert shapes == [(36 if outputs == 36 else 40, 48)]


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


@each_terms
def test_a_row_has_the_same_bits_in_any_batch(terms: int) -> None:
    layer, rows = exact_int8_linear(random_weight(768, 256), terms), random_rows(40, 256)
    together = layer(rows)
    for first, last in ((0, 1), (39, 40), (3, 20), (5, 38)):
        assert torch.equal(layer(rows[first:last]), together[first:last])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@each_terms
def test_a_row_that_is_not_finite_is_nan_alone(bad: float, terms: int) -> None:
    layer, rows = exact_int8_linear(random_weight(37, 48), terms), random_rows(9, 48)
    expected = layer(rows)
    rows[4, 7] = bad
    result = layer(rows)
    assert result[4].isnan().all()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(result[others], expected[others])


@each_terms
def test_a_row_of_zeros_gives_the_bias(terms: int) -> None:
    weight = random_weight(37, 48, bias=True)
    assert weight.bias is not None
    assert torch.equal(exact_int8_linear(weight, terms)(torch.zeros(2, 48))[1], weight.bias)


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


def _logits(checkpoint: Checkpoint) -> torch.Tensor:
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
