"""What a loaded model is made of, read back from the model and not repeated from the settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from llama_engine.libraries import Linear4bit, Linear8bitLt
from llama_engine.model.int8_linear import Int8Linear


@dataclass(frozen=True)
class ModelInfo:
    """What the loaded model is made of, read back from it.

    linears: number of linear layers by weight dtype. rounds_activations: whether an 8-bit product rounds its
    activations to 8 bits too.
    """

    linears: dict[str, int]
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    threshold: float | None
    rounds_activations: bool

    def describe(self) -> str:
        """Return the info as one line."""
        linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(self.linears.items()))
        threshold = "" if self.threshold is None else f", outlier threshold {self.threshold:g}"
        if self.threshold is not None and not self.rounds_activations:
            threshold += ", activations not rounded"
        return (
            f"loaded {self.weight_bytes / 2**20:,.1f} MiB of weights: linear layers {linears}{threshold}; "
            f"everything else {str(self.dtype).removeprefix('torch.')}; on {self.device}"
        )


def read_model_info(model: LlamaForCausalLM) -> ModelInfo:
    """Look at every linear layer and every weight of a loaded model."""
    linears: Counter[str] = Counter()
    thresholds: set[float] = set()
    rounds = False
    size = 0
    for module in model.modules():
        if isinstance(module, Linear8bitLt):
            thresholds.add(module.state.threshold)
            rounds |= not isinstance(module, Int8Linear)
            # The row scales of an 8-bit weight hang on the parameter and aren't counted with the parameters below.
            scales = getattr(module.weight, "SCB", None)
            size += 0 if scales is None else scales.nbytes
        if isinstance(module, torch.nn.Linear):
            nf4 = isinstance(module, Linear4bit)
            linears["nf4" if nf4 else str(module.weight.dtype).removeprefix("torch.")] += 1
    tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}
    size += sum(tensor.nbytes for tensor in tensors.values())
    embedding = model.model.embed_tokens.weight
    return ModelInfo(dict(linears), size, embedding.dtype, embedding.device, max(thresholds, default=None), rounds)
