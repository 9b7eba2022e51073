"""Small random LoRA adapters, written by PEFT."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from llama_engine.checkpoint.architecture import Architecture, read_architecture
from llama_engine.checkpoint.config import read_config
from llama_engine.checkpoint.lora import ADAPTER
from llama_engine.checkpoint.lora_config import CONFIG
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def save_adapter(base: Path, folder: Path, config: Mapping[str, object] | None = None) -> PeftModel:
    """Save an adapter of random weights for the checkpoint `base` in `folder`; return PEFT's model with it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    # Without PEFT's initialization, which zeroes B.
    values: dict[str, Any] = {"target_modules": "all-linear", "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        # PEFT asks transformers for gradient checkpointing by a name that will be removed.
        warnings.simplefilter("ignore", FutureWarning)
        adapted = get_peft_model(model, LoraConfig(**{**values, **(config or {})}), autocast_adapter_dtype=False)
    assert isinstance(adapted, PeftModel)
    adapted.save_pretrained(str(folder))
    return adapted.eval().requires_grad_(False)


def change_config(folder: Path, **changed: object) -> None:
    """Set fields of an adapter's config."""
    path = folder / CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change an adapter's tensors in place."""
    tensors = load_file(folder / ADAPTER)
    change(tensors)
    save_file(tensors, folder / ADAPTER)


def architecture_of(base: Path) -> Architecture:
    """Return the architecture of a checkpoint."""
    return read_architecture(read_config(base, base.name), base.name)
