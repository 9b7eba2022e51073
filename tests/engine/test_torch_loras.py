"""LoRA adapters of models that PyTorch computes: in captured steps, in float16, and while others are loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from adapter_files import write_adapter
from engine.engines import completions, engine_of, load
from engine.prompts import request_of
from engine.test_cuda_graphs import _graphed, as_on_a_gpu
from llama_engine.engine.engine import Engine
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from safetensors.torch import load_file, save_file

__all__ = ["as_on_a_gpu"]


def _of_each_adapter(engine: Engine, checkpoint: LoadedModel) -> list[GenerationRequest]:
    adapters = [None, *engine.adapters.loaded()]
    return [replace(request_of(checkpoint, 1, 40), adapter=adapter) for adapter in adapters]


def test_captured_steps_give_each_adapters_tokens(fp32: LoadedModel, tmp_path: Path) -> None:
    checkpoint = replace(fp32, max_model_len=128)
    adapters = ", ".join(f"{seed}={write_adapter(tmp_path / f'{seed}', seed)}" for seed in range(2))
    launched = engine_of(checkpoint, 6, lora_adapters=adapters)
    graphed, recorder = _graphed(checkpoint, lora_adapters=adapters)
    results = completions(launched, _of_each_adapter(launched, checkpoint))
    assert completions(graphed, _of_each_adapter(graphed, checkpoint)) == results
    assert len({result.text for result in results}) == 3
    assert recorder.replayed > 0


def test_an_adapter_beyond_float16_changes_no_other_sequence(tmp_path: Path) -> None:
    checkpoint = load("none", dtype="float16")
    huge = write_adapter(tmp_path / "huge", 1) / "adapter_model.safetensors"
    save_file({name: 1e6 * tensor for name, tensor in load_file(huge).items()}, huge)
    good = f"good={write_adapter(tmp_path / 'good', 0)}"
    engine = engine_of(checkpoint, 4, lora_adapters=good, max_loras="2", prefix_cache="off")
    requests = _of_each_adapter(engine, checkpoint)
    expected = completions(engine, requests)
    engine.adapters.load("huge", 0, tmp_path / "huge")
    assert completions(engine, requests) == expected
