"""A copy of a checkpoint that computes the same function with hostile activations, as large models have them.

- Hidden dimensions: some elements of every norm's gain are multiplied by a factor, and the columns of the next weights
  that read them are divided by it. So these dimensions are outliers in the inputs of q|k|v, gate|up and the head.
- Massive activations at single tokens: some rows of every `up` projection are multiplied, and the columns of `down` are
  divided. The rows are those whose products with `gate` are the rarest: the largest value over the root mean square,
  on a text.

In exact arithmetic nothing changes; in floats only roundings do, and a power of two would change none.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from llama_engine.model.llama import Linear, Llama
from llama_engine.model.loader import Checkpoint
from safetensors.torch import load_file, save_file

from perf.quality.divergence import Forward

HIDDEN = 4
"""Number of hidden dimensions that become outliers."""
INTERMEDIATE = 4
"""Number of rare intermediate dimensions per layer that become massive."""


def plant(checkpoint: Checkpoint, folder: Path, target: Path, factor: float, row: Sequence[int]) -> None:
    """Write the copy to the folder `target`. checkpoint: in floats, loaded from `folder`. row: tokens of a text."""
    rare = _rare_dimensions(checkpoint, row)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    embedding = tensors["model.embed_tokens.weight"]
    # The head reads the final norm's output, the embedding doesn't: they are no longer tied.
    tensors.setdefault("lm_head.weight", embedding.clone())
    hidden = torch.randperm(config["hidden_size"], generator=torch.Generator().manual_seed(0))[:HIDDEN]

    def scale(norm: str, readers: Sequence[str]) -> None:
        tensors[norm][hidden] *= factor
        for reader in readers:
            tensors[reader][:, hidden] /= factor

    for number in range(layers):
        layer = f"model.layers.{number}."
        scale(layer + "input_layernorm.weight", [f"{layer}self_attn.{name}_proj.weight" for name in "qkv"])
        scale(layer + "post_attention_layernorm.weight", [f"{layer}mlp.{name}_proj.weight" for name in ("gate", "up")])
        tensors[layer + "mlp.up_proj.weight"][rare[number]] *= factor
        tensors[layer + "mlp.down_proj.weight"][:, rare[number]] /= factor
    scale("model.norm.weight", ["lm_head.weight"])
    shutil.copytree(folder, target, dirs_exist_ok=True)
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _rare_dimensions(checkpoint: Checkpoint, row: Sequence[int]) -> list[torch.Tensor]:
    """Return for each layer the intermediate dimensions with the highest ratio of largest value to root mean square."""
    assert isinstance(checkpoint.model, Llama), "floats are computed by PyTorch"
    inputs: list[torch.Tensor] = []

    def recorded(down: Linear) -> Linear:
        def run(gated: torch.Tensor) -> torch.Tensor:
            inputs.append(gated)
            return down(gated)

        return run

    layers = [replace(layer, down=recorded(layer.down)) for layer in checkpoint.model.layers]
    Forward(replace(checkpoint, model=replace(checkpoint.model, layers=layers))).hidden(row)
    ratios = [gated.abs().amax(0) / gated.square().mean(0).sqrt() for gated in inputs]
    return [ratio.topk(INTERMEDIATE).indices for ratio in ratios]
