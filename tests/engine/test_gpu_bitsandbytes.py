"""bitsandbytes' layers in transformers' modules (nf4, an outlier threshold) on a GPU without a device.

A parameter of bitsandbytes can't be a tensor without values: the modules are loaded on the CPU, and moved.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bitsandbytes.nn.modules import Int8Params, Params4bit
from engine.checkpoints import save_small
from engine.fake_gpu import CPU, DEVICE, TOKEN, fake_gpu
from llama_engine.engine.engine import Engine
from llama_engine.engine.responses import Completion
from llama_engine.kernels.gpu.elementwise import SEPARATE
from llama_engine.kernels.gpu.varlen_attention import varlen_attention
from llama_engine.model import load_plan as products
from llama_engine.model import transformers_reader
from llama_engine.model.loader import load_checkpoint
from llama_engine.request.parser import GenerationRequest
from llama_engine.settings import Settings
from llama_engine.text.tokenizer import Tokenizer
from transformers import LlamaConfig, PreTrainedModel


def _move(model: PreTrainedModel) -> PreTrainedModel:
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


@pytest.mark.parametrize("values", [{"quantization": "nf4"}, {"int8_threshold": "6"}], ids=["nf4", "threshold"])
def test_layers_of_bitsandbytes_generate_on_a_gpu(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, values: dict[str, str]
) -> None:
    folder = save_small(tmp_path / "llama", tokenizer)
    settings = Settings.parse({"model": str(folder), "device": "cuda", "prefill_tokens": "32", **values}, {})
    config = LlamaConfig.from_pretrained(folder)
    model = transformers_reader.load_with_transformers(str(folder), config, settings, CPU, torch.float16)
    with fake_gpu(monkeypatch):
        monkeypatch.setattr(transformers_reader, "load_with_transformers", lambda *_: _move(model))
        # Their verification needs values.
        monkeypatch.setattr(products, "choose_attention", lambda *_: varlen_attention)
        monkeypatch.setattr(products, "choose_elementwise", lambda *_: SEPARATE)
        # Prompts of one token, of several, and of more than a prefill pass.
        prompts = [GenerationRequest("", (TOKEN,) * size, max_tokens=3, min_tokens=3) for size in (1, 9, 40)]
        engine = Engine(load_checkpoint(settings, DEVICE), settings, 4)
        assert all(isinstance(result, Completion) for result in engine.generate(prompts))
