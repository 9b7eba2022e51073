"""What a loaded model is and how it computes: two lines of the log, and the labels of `llama_model_info`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelInfo:
    """Precision and size of a loaded model.

    linears: number of linear layers by weight dtype. dtype: the unquantized weights'. threshold: outlier threshold of
    LLM.int8(); 0: its layers aren't used. product: description of the product of INT8 weights; empty for others.
    batch_invariant: whether the bits of a sequence's logits are the same in any batch. Those of float products are not:
    matrix libraries choose the order of their sums by the number of tokens.
    """

    linears: dict[str, int]
    weight_bytes: int
    dtype: torch.dtype
    device: torch.device
    threshold: float = 0.0
    product: str = ""
    batch_invariant: bool = False

    @property
    def computation(self) -> str:
        """The product of the linear layers, and whether logits are batch-invariant, as one text."""
        product = self.product or f"{' and '.join(sorted(self.linears))} weights"
        return f"{product}: {'' if self.batch_invariant else 'not '}batch-invariant"

    def describe(self) -> str:
        """Return the info as one line, for the log."""
        linears = ", ".join(f"{count} in {kind}" for kind, count in sorted(self.linears.items()))
        threshold = f", outlier threshold {self.threshold:g}" if self.threshold else ""
        product = f", {self.product}" if self.product else ""
        return (
            f"loaded {self.weight_bytes / 2**20:,.1f} MiB of weights: linear layers {linears}{threshold}{product}; "
            f"everything else {str(self.dtype).removeprefix('torch.')}; on {self.device}"
        )
