"""Reads scales, and refuses those with which a layer has no finite weights."""

from __future__ import annotations

import torch

from llama_engine.errors import CheckpointError
from llama_engine.model.saved_tensors import SavedTensors

MAX_SCALE = 1e35
"""Largest magnitude of a scale. Its products with 8-bit integers or floats are finite. Scales may be negative or 0."""


def read_scales(saved: SavedTensors, name: str) -> torch.Tensor:
    """Return saved scales in float32. Raises CheckpointError for one that is NaN, infinite or too large."""
    scales = saved.read(name).float()
    # NaN compares false.
    if not (scales.abs() <= MAX_SCALE).all():
        raise CheckpointError(f"{saved.folder} has a scale in {name} that is NaN or larger than {MAX_SCALE:.0e}")
    return scales
