"""LoRA adapters of a model that PyTorch computes: all of them in two products per linear layer, with a mask.

The ranks of all adapters lie side by side: a token's terms x · Aᵀ are masked to those of its own adapter before the
product with Bᵀ. That costs as much for one adapter as for all; the shapes don't depend on the batch, so that a CUDA
graph can hold the products. It has never run on a GPU.
"""

from __future__ import annotations

from functools import partial

import torch

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.lora import LoraAdapter
from llama_engine.checkpoint.tensor_names import layer_linears
from llama_engine.kernels.lora_limits import LoraLimits, lora_parts
from llama_engine.model.llama import Adapt, without_adapters


def stacked_lora_bytes(architecture: Architecture, limits: LoraLimits, dtype: torch.dtype) -> int:
    """Return the bytes of `limits.count` adapters on all linear layers, in a dtype."""
    numbers = 0
    for linears in layer_linears(architecture).values():
        ranks = limits.count * len(linears) * limits.rank
        numbers += ranks * (linears[0].shape[1] + sum(linear.shape[0] for linear in linears) + 1)
    return architecture.layers * numbers * dtype.itemsize


class TorchLoras:
    """The adapters of a `TorchRunner`: their weights, and the one of each slot's sequence."""

    def __init__(
        self, architecture: Architecture, slots: int, limits: LoraLimits, like: torch.Tensor, always: bool
    ) -> None:
        """Allocate the weights. like: a tensor of their dtype and device. always: compute without adapters, too."""
        self._architecture, self._limits = architecture, limits
        self._always = always and limits.count > 0
        # The adapter of each slot, on the device and on the host.
        self._adapters = torch.zeros(slots, dtype=torch.int64, device=like.device)
        self._of_slot = [0] * slots
        self._loaded: set[int] = set()
        layers = architecture.layers if limits.count else 0
        # For each field and layer: A [in, ranks], B [ranks, out], the scaling and the adapter of each rank.
        self._weights = {
            (index, field): self._empty(len(linears), linears[0].shape[1], sum(part.shape[0] for part in linears), like)
            for index in range(layers)
            for field, linears in layer_linears(architecture).items()
        }

    def load(self, index: int, adapter: LoraAdapter | None) -> None:
        """Set the weights of an adapter, from 1 to `limits.count`; None frees its number. No slot may have it.

        Any thread may call it. Raises IndexError for another index.
        """
        if not 1 <= index <= self._limits.count:
            raise IndexError(f"adapter {index} is outside the room for {self._limits.count}")
        if adapter is None:
            self._loaded.discard(index)
            return
        for layer, weights in enumerate(adapter.layers):
            for field, parts in lora_parts(self._architecture, weights).items():
                a, b, scaling, owner = self._weights[layer, field]
                ranks = (owner == index).nonzero()[:, 0]
                a[:, ranks], b[ranks] = 0, 0
                for part in parts:
                    own = ranks[part.first_rank : part.first_rank + len(part.weights.a)]
                    channels = slice(part.first_output, part.first_output + len(part.weights.b))
                    a[:, own] = part.weights.a.T.to(a)
                    b[own, channels] = part.weights.b.T.to(b)
                    scaling[own] = part.weights.scaling
        self._loaded.add(index)

    def set(self, slot: int, index: int) -> None:
        """Set the adapter of a slot's sequence; 0 is none. Raises IndexError for an adapter that isn't loaded."""
        if index and index not in self._loaded:
            raise IndexError(f"adapter {index} is not loaded")
        if index != self._of_slot[slot]:
            self._of_slot[slot] = index
            self._adapters[slot] = index

    def of_pass(self, slots: torch.Tensor) -> Adapt:
        """Return what adds the adapters of a pass' tokens [n] in these slots."""
        if not self._always and not any(self._of_slot):
            return without_adapters
        return partial(self._adapt, self._adapters[slots, None])

    def _adapt(
        self, adapters: torch.Tensor, layer: int, field: str, inputs: torch.Tensor, outputs: torch.Tensor
    ) -> torch.Tensor:
        a, b, scaling, owner = self._weights[layer, field]
        # Not a product with 0, which keeps a NaN of an adapter that is being loaded.
        terms = torch.where(owner == adapters, inputs.to(a.dtype) @ a * scaling, 0)
        return outputs + (terms @ b).to(outputs.dtype)

    def _empty(
        self, fused: int, inputs: int, outputs: int, like: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        each = fused * self._limits.rank
        ranks = self._limits.count * each
        owner = torch.arange(1, self._limits.count + 1, device=like.device).repeat_interleave(each)
        return like.new_zeros(inputs, ranks), like.new_zeros(ranks, outputs), like.new_zeros(ranks), owner
