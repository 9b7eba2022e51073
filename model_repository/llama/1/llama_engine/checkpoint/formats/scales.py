"""Saved scales: of weights, which are read, and of activations, which are ignored.

The engine quantizes each activation row by its own largest value.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from llama_engine.checkpoint.formats.linear_format import Expected
from llama_engine.checkpoint.tensors import SavedTensors
from llama_engine.errors import CheckpointError

MAX_SCALE = 1e35
"""Largest magnitude of a scale. Its products with 8-bit integers or floats are finite. Scales may be negative or 0."""

_ACTIVATION_SCALES = (
    "input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale", "output_zero_point"
)  # fmt: skip

_log = logging.getLogger(__name__)


def read_scales(saved: SavedTensors, name: str) -> torch.Tensor:
    """Return saved scales in float32, refusing those with which a layer has no finite weights.

    Raises CheckpointError for one that is NaN, infinite or too large.
    """
    scales = saved.read(name).float()
    # NaN compares false.
    if not (scales.abs() <= MAX_SCALE).all():
        raise CheckpointError(f"{saved.folder} has a scale in {name} that is NaN or larger than {MAX_SCALE:.0e}")
    return scales


def log_activation_scales(saved: SavedTensors) -> None:
    """Log one line if the checkpoint has scales of activations."""
    if names := sorted(name for name in saved if name.rpartition(".")[2] in _ACTIVATION_SCALES):
        _log.warning("%d saved scales of activations are ignored, first %s", len(names), names[0])


def activation_scales(saved: SavedTensors, linear: str) -> Mapping[str, Expected]:
    """Return a layer's scales of activations by name, as they are saved."""
    names = (f"{linear}.{name}" for name in _ACTIVATION_SCALES)
    return {name: Expected(saved[name].shape, (saved[name].dtype,)) for name in names if name in saved}
