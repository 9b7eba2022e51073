"""Precision and size of a loaded model, read from the model, not from the settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from llama_engine.libraries import Linear4bit, Linear8bitLt
from llama_engine.model.int8_linear import Int8Linear


@dataclass(frozen=True)
class ModelInfo:
    """Precision and size of a loaded model.

    linears: number of linear layers by weight dtype. dtype: of unquantized weights. threshold: bitsandbytes' outlier
    threshold, None without 8-bit layers. rounds_activations: whether 8-bit products round activations to 8 bits, too.
    """

    linears: dict[str, int]
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    threshold: float | None
    rounds_activations: bool

    def describe(self) -> str:
        """Return the info as one line, for the log."""
        linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(self.linears.items()))
        threshold = "" if self.threshold is None else f", outlier threshold {self.threshold:g}"
        if self.threshold is not None and not self.rounds_activations:
            threshold += ", activations not rounded"
        return (
            f"loaded {self.weight_bytes / 2**20:,.1f} MiB of weights: linear layers {linears}{threshold}; "
            f"everything else {str(self.dtype).removeprefix('torch.')}; on {self.device}"
        )


def read_model_info(model: LlamaForCausalLM) -> ModelInfo:
    """Read the info from the model's layers and weights."""
    linears: Counter[str] = Counter()
    thresholds: set[float] = set()
    rounds = False
    size = 0
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            thresholds.add(module.state.threshold)
            rounds |= not isinstance(module, Int8Linear)
            # The row scales are an attribute of the 8-bit weight, not a parameter.
            scales = getattr(module.weight, "SCB", None)
            size += 0 if scales is None else scales.nbytes
        if isinstance(module, torch.nn.Linear):
            nf4 = isinstance(module, Linear4bit)
            linears["nf4" if nf4 else str(module.weight.dtype).removeprefix("torch.")] += 1
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    size += sum(tensor.nbytes for tensor in tensors.values())
    embedding = model.model.embed_tokens.weight
    return ModelInfo(dict(linears), size, embedding.dtype, embedding.device, max(thresholds, default=None), rounds)
