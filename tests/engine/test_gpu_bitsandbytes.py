"""bitsandbytes' layers in transformers' modules (nf4, an outlier threshold) on a GPU without a device.

A parameter of bitsandbytes can't be a tensor without values: the modules are loaded on the CPU, and moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from bitsandbytes.nn.modules import Int8Params, Params4bit
from engine.checkpoints import save_small
from engine.engines import add_all, runner_of
from engine.fake_gpu import CPU, DEVICE, OUTLIER_WAITS, TOKEN, Recorder, fake_gpu
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.kernels.gpu.elementwise import SEPARATE
from llama_engine.kernels.gpu.varlen_attention import varlen_attention
from llama_engine.model import load_plan as products
from llama_engine.model import transformers_reader
from llama_engine.model.loader import load_checkpoint
from llama_engine.model.model_runner import PromptChunk
from llama_engine.request.parser import GenerationRequest
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaConfig, PreTrainedModel

LINEARS = 2 * 7
"""Quantized layers; the head stays in FP16."""
PRODUCTS = {"nf4": "bitsandbytes.gemm_4bit.default", "int8": "bitsandbytes.int8_mixed_scaled_mm.default"}


class Gpu(NamedTuple):
    """An engine, the format of its weights, and what it does on the GPU."""

    engine: Engine
    kind: str
    recorder: Recorder


def move(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the tensors of a model by tensors on the GPU without values."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            moved = torch.nn.Parameter(parameter.data.to(DEVICE), requires_grad=False)
            setattr(module, name, moved)
            if isinstance(parameter, Int8Params):
                moved.CB, moved.SCB = moved.data, parameter.SCB.to(DEVICE)  # type: ignore[attr-defined]  # bitsandbytes'
            elif isinstance(parameter, Params4bit):
                parameter.quant_state.to(DEVICE)
                moved.quant_state = parameter.quant_state  # type: ignore[attr-defined]  # bitsandbytes'
    return model


@pytest.fixture(scope="module", params=[{"quantization": "nf4"}, {"int8_threshold": "6"}], ids=["nf4", "threshold"])
def gpu(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gpu]:
    folder = save_small(tmp_path_factory.mktemp("small") / "llama", tokenizer)
    settings = Settings.parse({"model": str(folder), "device": "cuda", "prefill_tokens": "32", **request.param}, {})
    config = LlamaConfig.from_pretrained(folder)
    model = transformers_reader.load_with_transformers(str(folder), config, settings, CPU, torch.float16)
    with pytest.MonkeyPatch.context() as monkeypatch, fake_gpu(monkeypatch) as recorder:
        monkeypatch.setattr(transformers_reader, "load_with_transformers", lambda *_: move(model))
        # Their verification needs values.
        monkeypatch.setattr(products, "choose_attention", lambda *_: varlen_attention)
        monkeypatch.setattr(products, "choose_elementwise", lambda *_: SEPARATE)
        yield Gpu(Engine(load_checkpoint(settings, DEVICE), settings, 4), settings.quantization, recorder)


def steps(gpu: Gpu) -> Iterator[int]:
    """Generate for prompts of one token, of several, and of more than a prefill pass; yield each step's passes."""
    prompts = [GenerationRequest("", (TOKEN,) * size, max_tokens=3, min_tokens=3) for size in (1, 9, 40)]
    sequences = add_all(gpu.engine, prompts)
    while gpu.engine.used_slots:
        gpu.recorder.clear()
        step = gpu.engine.step()
        yield bool(step.prefill_tokens) + bool(step.decoded)
    assert all(isinstance(sequence.result, Completion) for sequence in sequences)


def test_each_linear_layer_is_one_product_of_bitsandbytes(gpu: Gpu) -> None:
    info = gpu.engine._checkpoint.info
    assert (info.device, info.linears) == (DEVICE, {gpu.kind: LINEARS, "float16": 1})
    for passes in steps(gpu):
        assert gpu.recorder.launches.count(PRODUCTS[gpu.kind]) == passes * LINEARS


def test_a_step_waits_once_and_at_each_product_with_an_outlier_threshold(gpu: Gpu) -> None:
    for passes in steps(gpu):
        products_waits = OUTLIER_WAITS * passes * LINEARS if gpu.kind == "int8" else 0
        assert (gpu.recorder.waits, gpu.recorder.blocking_copies) == (1 + products_waits, 0)


def test_hidden_states_and_logits_are_float16(gpu: Gpu) -> None:
    runner = runner_of(gpu.engine)
    with torch.inference_mode():
        hidden = runner.prefill([PromptChunk(0, 0, (TOKEN,) * 9)])
        logits = runner.logits(hidden)
    assert {(tensor.device, tensor.dtype) for tensor in (hidden, logits)} == {(DEVICE, torch.float16)}
