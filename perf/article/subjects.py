"""What is measured: the article's three configurations, and the product in INT8 and unquantized.

Knows what each must turn out to be once it runs, and nothing about running.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from limit.rates import Weights

_TORCH_NAMES: dict[Weights, str] = {"fp32": "float32", "fp16": "float16", "int8": "int8"}


@dataclass(frozen=True)
class Subject:
    """One configuration of our server.

    key: in results. variant: the config's name. weights: of the linear layers. environment: over the config's own
    parameters. max_batch_size, dynamic_batching, scheduling: as the running server must have them.
    """

    key: str
    title: str
    variant: str
    weights: Weights
    max_batch_size: int
    dynamic_batching: bool
    scheduling: str
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def linears(self) -> str:
        """The dtype of the linear layers as PyTorch calls it; in INT8 the head has another one."""
        return _TORCH_NAMES[self.weights]


def subjects() -> list[Subject]:
    """Return all five, in the order of the article and then the product."""
    # What the setting dtype=auto comes to.
    plain: Weights = "fp16" if torch.cuda.is_available() else "fp32"
    return [
        Subject("naive_fp16", "naive FP16", "naive_fp16", "fp16", 1, False, "batch"),
        Subject("batched_fp16", "batched FP16", "batched_fp16", "fp16", 8, True, "batch"),
        Subject("batched_int8", "batched INT8", "batched_int8", "int8", 8, True, "batch"),
        Subject("inflight_int8", "in-flight INT8", "default", "int8", 32, True, "inflight"),
        Subject(
            f"inflight_{plain}",
            f"in-flight {plain.upper()}",
            "default",
            plain,
            32,
            True,
            "inflight",
            {"LLAMA_QUANTIZATION": "none"},
        ),
    ]
