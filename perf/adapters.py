"""LoRA adapters of random weights, as PEFT saves them: rank 16 on every linear layer of a checkpoint but its head.

What an adapter costs depends on its shapes and not on its values, which are small here, lest activations become
outliers. They are float32: PEFT trains and saves adapters so by default, also of a model in 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from perf.checkpoint import FOLDER, building
from perf.environment import ROOT

RANK = 16
NAMES = tuple(f"lora{number}" for number in range(8))


def lora_adapters(model: str) -> list[str]:
    """Return the setting `lora_adapters`: NAME=FOLDER of each adapter, relative to the project's folder.

    model: the name that `with_adapters` got.
    """
    return [f"{name}={(_folder(model) / name).relative_to(ROOT)}" for name in NAMES]


def with_adapters(model: str, make: Callable[[], Path]) -> Path:
    """Return the checkpoint that `make` makes, once there are adapters for it.

    model: names their folder, which is written unless it exists.
    """
    checkpoint, target = make(), _folder(model)
    if not target.exists():
        with building(target) as folder:
            for number, name in enumerate(NAMES):
                write(checkpoint, folder / name, number)
    return checkpoint


def write(checkpoint: Path, folder: Path, seed: int) -> None:
    """Write an adapter for the checkpoint into a new folder."""
    with torch.device("meta"):
        layers = LlamaForCausalLM(LlamaConfig.from_pretrained(checkpoint)).model.named_modules()
    linears = {name: layer for name, layer in layers if isinstance(layer, nn.Linear)}
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        f"base_model.model.model.{name}.lora_{part}.weight": shape
        for name, layer in linears.items()
        for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK)))
    }
    tensors = {name: torch.empty(shape).normal_(0, 0.01, generator=generator) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    targets = sorted({name.rpartition(".")[2] for name in linears})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _folder(model: str) -> Path:
    return FOLDER / "adapters" / model
