"""LoRA adapters of random weights for the embedded checkpoint, in PEFT's files."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SHAPES = {"self_attn.q_proj": (256, 256), "self_attn.v_proj": (128, 256), "mlp.down_proj": (256, 768)}
"""Outputs and inputs of the adapted linear layers."""

LAYERS = 6


def write_adapter(folder: Path, seed: int, rank: int = 4) -> Path:
    """Write an adapter that changes what the checkpoint generates; return its folder."""
    folder.mkdir(parents=True)
    targets = [name.rpartition(".")[2] for name in SHAPES]
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 8, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    save_file(
        {
            f"base_model.model.model.layers.{layer}.{name}.lora_{side}.weight": torch.randn(shape, generator=random) / 8
            for layer in range(LAYERS)
            for name, (outputs, inputs) in SHAPES.items()
            for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
        },
        folder / "adapter_model.safetensors",
    )
    return folder


def damage(folder: Path) -> Path:
    """Cut an adapter's weights off; return its folder."""
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    return folder
