"""Kernels of a GPU, on CPU tensors: a fused function or an attention is used only if it agrees with its reference."""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec, module_from_spec

import pytest
import torch
from engine.engines import attention_by_sequence, load, needs_compiled_kernels
from engine.int8_layers import random_weight
from engine.logits import logits_of
from llama_engine.checkpoint.per_channel import requantized
from llama_engine.checkpoint.weights import LinearWeight
from llama_engine.errors import CheckpointError
from llama_engine.kernels.activation_terms import MAX_INPUTS
from llama_engine.kernels.gpu import elementwise, varlen_attention
from llama_engine.kernels.gpu.elementwise import SEPARATE, choose_elementwise
from llama_engine.kernels.gpu.exact_int8 import exact_int8_linear
from llama_engine.kernels.gpu.varlen_attention import Layout, VarlenAttention, choose_attention
from llama_engine.model.load_plan import LinearLayers, LoadPlan

CPU = torch.device("cpu")
HIDDEN, HEADS, HEAD_DIM = 256, 6, 16


def _failing(_: Callable[..., object]) -> Callable[..., object]:
    def compiled(*_: object) -> object:
        raise RuntimeError("Failed to find C compiler")

    return compiled


def _inexact(function: Callable[..., torch.Tensor]) -> Callable[..., object]:
    return function if function.__name__ != "rotate" else lambda *arguments: function(*arguments) * 1.001


@pytest.mark.parametrize(
    ("fuse", "names", "reason"),
    [
        (_failing, ["quantize", "dequantize", "rotary"], "Failed to find C compiler"),
        (_inexact, ["rotary"], "its bits differ"),
    ],
)
def test_functions_that_fail_or_differ_are_not_used(
    fuse: Callable[..., object],
    names: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(elementwise, "_fuse", fuse)
    assert choose_elementwise(CPU, torch.float16, HIDDEN, HEADS, HEAD_DIM, 2) == SEPARATE
    assert caplog.messages == [
        f"`{name}` can't be fused; its operations are launched: RuntimeError: {reason}" for name in names
    ]


# PyTorch's compiler calls it.
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.long
def test_a_function_with_the_same_bits_is_used_and_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    chosen = choose_elementwise(CPU, torch.float32, HIDDEN, HEADS, HEAD_DIM, None)
    assert chosen.rotary != SEPARATE.rotary
    with torch.inference_mode(), torch._dynamo.config.patch(error_on_recompile=True):
        # The values follow the heads to be rotated.
        heads, angles = torch.randn(7, HEADS + 1, HEAD_DIM)[:, :-1], torch.randn(7, 1, HEAD_DIM // 2)
        result = chosen.rotary(heads, angles.cos(), angles.sin())
        assert torch.equal(result, SEPARATE.rotary(heads, angles.cos(), angles.sin()))
    torch._dynamo.reset()
    assert not [record for record in caplog.records if record.name == elementwise.__name__]


@pytest.mark.parametrize("divisor", [127, 254])
def test_a_quotient_is_rounded_once(divisor: int) -> None:
    values = torch.rand(200_000, generator=torch.Generator().manual_seed(3)) * 1000
    assert torch.equal(elementwise.divide(values, divisor), values / torch.full_like(values, divisor))


def _raising(*_: object) -> torch.Tensor:
    raise RuntimeError("FlashAttention only supports head dims up to 256\nat line 7")


def _longer(layout: Layout) -> Layout:
    return layout._replace(lengths=layout.lengths + 1)


WRONG = "its result is wrong by "


@pytest.mark.parametrize(
    ("attention", "capability", "windowed", "reason"),
    [
        (attention_by_sequence, (8, 0), True, None),
        (attention_by_sequence, (7, 5), False, "this GPU is older than Ampere"),
        (_raising, (9, 0), False, "FlashAttention only supports head dims up to 256"),
        (lambda query, *_: query * torch.nan, (9, 0), False, f"{WRONG}nan% of the largest value"),
        # Not causal.
        (lambda q, k, v, layout, *rest: attention_by_sequence(q, k, v, _longer(layout), *rest), (9, 0), False, WRONG),
        # Within the tolerance, but larger beside others.
        (lambda *arguments: attention_by_sequence(*arguments) * (1 + len(arguments[3].lengths) / 512), (9, 0), False,
         "on this GPU a sequence's result depends on its neighbours"),
        # Without a window.
        (lambda q, k, v, layout, scale, _: attention_by_sequence(q, k, v, layout, scale, None), (8, 0), False, None),
        (lambda q, k, v, layout, scale, _: attention_by_sequence(q, k, v, layout, scale, None), (8, 0), True, WRONG),
    ],
)  # fmt: skip
def test_only_a_verified_attention_is_used(
    attention: VarlenAttention, capability: tuple[int, int], windowed: bool, reason: str | None,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(varlen_attention, "varlen_attention", attention)
    chosen = choose_attention(CPU, torch.float16, 16, 2, windowed)
    assert chosen is (attention if reason is None else None)
    lines = [f"FlashAttention can't be used; attention takes masks: RuntimeError: {reason}"] if reason else []
    assert len(caplog.messages) == len(lines)
    assert all(message.startswith(line) for message, line in zip(caplog.messages, lines, strict=True))


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
