"""Precision and size of a loaded model, read from the model, not from the settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BATCH = "the batch"
"""On which the bits of float products depend: matrix libraries choose the order of summation by the number of rows."""


@dataclass(frozen=True)
class ModelInfo:
    """Precision and size of a loaded model.

    linears: number of linear layers by weight dtype. dtype: of unquantized weights. threshold: bitsandbytes' outlier
    threshold, None without 8-bit layers. product: how exact 8-bit products are computed; empty for bitsandbytes' own
    layers, which round activations to one term. bits_depend_on: on what else than its own request the
    bits of a row's logits depend, in words; empty: on nothing.
    """

    linears: dict[str, int]
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    threshold: float | None
    product: str = ""
    bits_depend_on: str = BATCH

    @property
    def computation(self) -> str:
        """The product of the linear layers, and what else than its request a row's bits depend on, if on anything."""
        product = self.product or f"{' and '.join(sorted(self.linears))} weights"
        return f"{product}: bits depend on {self.bits_depend_on}" if self.bits_depend_on else product

    def describe(self) -> str:
        """Return the info as one line, for the log."""
        linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(self.linears.items()))
        threshold = "" if self.threshold is None else f", outlier threshold {self.threshold:g}"
        if self.product:
            threshold += f", {self.product}"
        return (
            f"loaded {self.weight_bytes / 2**20:,.1f} MiB of weights: linear layers {linears}{threshold}; "
            f"everything else {str(self.dtype).removeprefix('torch.')}; on {self.device}"
        )
