"""The compared quantizations: INT8 with several outlier thresholds, against the unquantized weights.

6 is LLM.int8()'s threshold: activations are rounded to 8 bits too, except outlier columns, which are computed in 16
bits. 0 is this server's default: on a CPU only the weights are rounded; on a GPU all activations too, which a threshold
that nothing reaches measures on a CPU. Reported facts are read back from the loaded models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, NoReturn

import torch
from llama_engine.model.loader import Checkpoint, load_checkpoint
from llama_engine.model.model_info import ModelInfo
from llama_engine.settings import Settings
from tqdm import tqdm

from perf.quality.divergence import both, perplexity, summary

_WEIGHTS = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


class Candidate(NamedTuple):
    """INT8 with one outlier threshold. kernels: the setting, which matters on a GPU only."""

    key: str
    threshold: float
    kernels: str = "stock"


UNREACHED = 1000.0
"""The setting's maximum."""
CANDIDATES = (
    Candidate("int8_threshold_0", 0.0),
    Candidate("int8_threshold_6", 6.0),
    Candidate("int8_no_outliers", UNREACHED),
)


def load(base: Settings, device: torch.device, candidate: Candidate | None = None) -> Checkpoint:
    """Load a candidate, or the unquantized reference: float16 on a GPU, float32 on a CPU."""
    if candidate is None:
        return load_checkpoint(replace(base, quantization="none"), device)
    settings = replace(base, quantization="int8", int8_threshold=candidate.threshold, kernels=candidate.kernels)
    return load_checkpoint(settings, device)


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
    threshold = "no outliers" if candidate.threshold == UNREACHED else f"threshold {candidate.threshold:g}"
    rounded = "activations rounded too" if loaded.info.rounds_activations else "weights only"
    return {
        name.lower(): {
            "title": name,
            **_facts(reference.info),
            "weights": name,
            "perplexity": round(perplexity(tokens.reference_loss), 4),
        },
        candidate.key: {
            "title": f"INT8, {threshold}, {rounded}",
            **_facts(loaded.info),
            "weights": "INT8",
            "threshold": loaded.info.threshold,
            **summary(tokens),
        },
    }


def _facts(info: ModelInfo) -> dict[str, object]:
    return {"weights_mib": round(info.weight_bytes / 2**20, 2), "loaded": info.describe()}
