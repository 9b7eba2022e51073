"""Precision and size of a loaded model, determined from its weights, not from the settings."""

from __future__ import annotations

from dataclasses import dataclass

import torch

BATCH = "the batch"
"""Value of `bits_depend_on` for float products: matrix libraries choose the summation order by the number of rows."""


@dataclass(frozen=True)
class ModelInfo:
    """Precision and size of a loaded model.

    linears: number of linear layers by weight dtype. dtype: of unquantized weights. threshold: outlier threshold of
    LLM.int8(); 0: its layers aren't used. product: description of the product of INT8 weights; empty for others.
    bits_depend_on: what the bits of a row's logits depend on besides its request, in words; empty if nothing.
    """

    linears: dict[str, int]
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    threshold: float = 0.0
    product: str = ""
    bits_depend_on: str = BATCH

    @property
    def computation(self) -> str:
        """The product of the linear layers and, if any, the dependency of a row's bits, as one text."""
        product = self.product or f"{' and '.join(sorted(self.linears))} weights"
        return f"{product}: bits depend on {self.bits_depend_on}" if self.bits_depend_on else product

    def describe(self) -> str:
        """Return the info as one line, for the log."""
        linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(self.linears.items()))
        threshold = f", outlier threshold {self.threshold:g}" if self.threshold else ""
        product = f", {self.product}" if self.product else ""
        return (
            f"loaded {self.weight_bytes / 2**20:,.1f} MiB of weights: linear layers {linears}{threshold}{product}; "
            f"everything else {str(self.dtype).removeprefix('torch.')}; on {self.device}"
        )
