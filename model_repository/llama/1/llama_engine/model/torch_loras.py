"""LoRA adapters of a model that PyTorch computes: all of them in two products per linear layer, with a mask.

The ranks of all adapters lie side by side: a token's terms x · Aᵀ are masked to those of its own adapter before the
product with Bᵀ. That costs as much for one adapter as for all; the shapes don't depend on the batch, so that a CUDA
graph can hold the products. They are in float32, in which every adapter is finite: in float16 an adapter could become
infinite, and 0 times infinity would reach other sequences. It has never run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.lora import LoraAdapter
from llama_engine.checkpoint.tensor_names import SavedLinear, layer_linears
from llama_engine.kernels.lora_layout import LoraLimits, lora_parts
from llama_engine.model.llama import Adapt, without_adapters


def stacked_lora_bytes(architecture: Architecture, limits: LoraLimits) -> int:
    """Return the bytes of `limits.count` adapters on all linear layers."""
    numbers = 0
    for linears in layer_linears(architecture).values():
        ranks = limits.count * len(linears) * limits.rank
        numbers += ranks * (linears[0].shape[1] + sum(linear.shape[0] for linear in linears) + 1)
    return architecture.layers * numbers * torch.float32.itemsize


class _Stack(NamedTuple):
    """All adapters' weights of a linear layer. a: [in, ranks]. b: [ranks, out]. scaling, owner: [ranks]; the adapter
    that a rank belongs to."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: torch.Tensor
    owner: torch.Tensor


class TorchLoras:
    """The adapters of a `TorchRunner`: their weights, and the one of each slot's sequence."""

    def __init__(
        self, architecture: Architecture, slots: int, limits: LoraLimits, device: torch.device, always: bool
    ) -> None:
        """Allocate the weights. always: whether passes without adapters compute the products, too."""
        self._architecture, self._limits = architecture, limits
        self._always = always and limits.count > 0
        # The adapter of each slot, on the device and on the host.
        self._adapters = torch.zeros(slots, dtype=torch.int64, device=device)
        self._of_slot = [0] * slots
        self._loaded: set[int] = set()
        layers = architecture.layers if limits.count else 0
        self._stacks = {
            (index, field): self._empty(linears, device)
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
                stack = self._stacks[layer, field]
                ranks = (stack.owner == index).nonzero()[:, 0]
                stack.a[:, ranks], stack.b[ranks] = 0, 0
                for part in parts:
                    part_ranks = ranks[part.first_rank : part.first_rank + len(part.weights.a)]
                    channels = slice(part.first_output, part.first_output + len(part.weights.b))
                    stack.a[:, part_ranks] = part.weights.a.T.to(stack.a)
                    stack.b[part_ranks, channels] = part.weights.b.T.to(stack.b)
                    stack.scaling[part_ranks] = part.weights.scaling
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
        stack = self._stacks[layer, field]
        # Not a product with 0: another adapter's terms can be infinite.
        terms = torch.where(stack.owner == adapters, inputs.float() @ stack.a * stack.scaling, 0)
        return outputs + (terms @ stack.b).to(outputs.dtype)

    def _empty(self, linears: Sequence[SavedLinear], device: torch.device) -> _Stack:
        """Return room for all adapters' weights of fused linear layers."""
        each = len(linears) * self._limits.rank
        ranks, inputs = self._limits.count * each, linears[0].shape[1]
        return _Stack(
            torch.zeros(inputs, ranks, device=device),
            torch.zeros(ranks, sum(linear.shape[0] for linear in linears), device=device),
            torch.zeros(ranks, device=device),
            torch.arange(1, self._limits.count + 1, device=device).repeat_interleave(each),
        )
