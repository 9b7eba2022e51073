"""The compared quantizations: INT8 with several outlier thresholds, against the unquantized weights.

6 is LLM.int8()'s threshold: activations are rounded to 8 bits too, except outlier columns, which are computed in 16
bits. 0 is this server's default: on a CPU only the weights are rounded; on a GPU all activations too, which a threshold
that nothing reaches measures on a CPU. Reported facts are read back from the loaded models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from llama_engine.model.loader import Checkpoint
from llama_engine.model.model_info import ModelInfo
from llama_engine.settings import Settings
from tqdm import tqdm

from perf.quality.divergence import both, perplexity, summary

_WEIGHTS = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Candidate:
    """INT8 with one outlier threshold. kernels: the setting, which matters on a GPU only."""

    key: str
    threshold: float
    kernels: str = "stock"

    def title(self, rounds_activations: bool) -> str:
        """Return the name in the table."""
        threshold = "no outliers" if self.threshold == UNREACHED else f"threshold {self.threshold:g}"
        return f"INT8, {threshold}, {'activations rounded too' if rounds_activations else 'weights only'}"

    def settings(self, base: Settings) -> Settings:
        """Return the settings to load it with."""
        return replace(base, quantization="int8", int8_threshold=self.threshold, kernels=self.kernels)


UNREACHED = 1000.0
"""The setting's maximum."""
CANDIDATES = (
    Candidate("int8_threshold_0", 0.0),
    Candidate("int8_threshold_6", 6.0),
    Candidate("int8_no_outliers", UNREACHED),
)


def reference_of(base: Settings) -> Settings:
    """Return the settings of the unquantized weights: float16 on a GPU, float32 on a CPU."""
    return replace(base, quantization="none")


def measured(
    candidate: Candidate,
    reference: Checkpoint,
    loaded: Checkpoint,
    rows: Sequence[Sequence[int]],
    progress: tqdm[NoReturn],
) -> dict[str, dict[str, object]]:
    """Compare the loaded candidate with the reference; return measurements by key, the reference's first."""
    tokens = both(reference.model, loaded.model, rows, progress)
    name = _WEIGHTS[reference.info.dtype]
    return {
        name.lower(): {
            "title": name,
            **_facts(reference.info),
            "weights": name,
            "perplexity": round(perplexity(tokens.reference_loss), 4),
        },
        candidate.key: {
            "title": candidate.title(loaded.info.rounds_activations),
            **_facts(loaded.info),
            "weights": "INT8",
            "threshold": loaded.info.threshold,
            **summary(tokens),
        },
    }


def _facts(info: ModelInfo) -> dict[str, object]:
    return {"weights_mib": round(info.weight_bytes / 2**20, 2), "loaded": info.describe()}
