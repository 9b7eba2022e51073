"""Precision and size of a loaded model, read from the model, not from the settings."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from llama_engine.kernels.gpu.int8_linear import Int8Linear
from llama_engine.libraries import Linear4bit, Linear8bitLt

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BATCH = "the batch"
"""On which the bits of float products depend: matrix libraries choose the order of summation by the number of rows."""


@dataclass(frozen=True)
class ModelInfo:
    """Precision and size of a loaded model.

    linears: number of linear layers by weight dtype. dtype: of unquantized weights. threshold: bitsandbytes' outlier
    threshold, None without 8-bit layers. rounds_activations: whether bitsandbytes' products round activations to 8
    bits, too. product: how 8-bit products are computed on a CPU. bits_depend_on: on what else than its own request the
    bits of a row's logits depend, in words; empty: on nothing.
    """

    linears: dict[str, int]
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    threshold: float | None
    rounds_activations: bool
    product: str = ""
    bits_depend_on: str = BATCH

    @property
    def computation(self) -> str:
        """How linear layers are computed, and on what else than its own request a row's bits depend, if on anything."""
        product = self.product or f"{' and '.join(sorted(self.linears))} weights"
        return f"{product}: bits depend on {self.bits_depend_on}" if self.bits_depend_on else product

    def describe(self) -> str:
        """Return the info as one line, for the log."""
        linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(self.linears.items()))
        threshold = "" if self.threshold is None else f", outlier threshold {self.threshold:g}"
        if self.threshold is not None and not self.rounds_activations:
            threshold += f", {self.product or 'activations not rounded'}"
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
