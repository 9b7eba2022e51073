"""Saved scales of activations, which the engine ignores: it quantizes each activation row by its own largest value."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from llama_engine.model.formats.linear_format import Expected
from llama_engine.model.saved_tensors import SavedTensors

_NAMES = ("input_scale", "input_zero_point", "input_scale_ub", "activation_scale", "output_scale", "output_zero_point")

_log = logging.getLogger(__name__)


def log_activation_scales(saved: SavedTensors) -> None:
    """Log one line if the checkpoint has scales of activations."""
    if names := sorted(name for name in saved if name.rpartition(".")[2] in _NAMES):
        _log.warning("%d saved scales of activations are ignored, first %s", len(names), names[0])


def activation_scales(saved: SavedTensors, linear: str) -> Mapping[str, Expected]:
    """Return a layer's scales of activations by name, as they are saved."""
    names = (f"{linear}.{name}" for name in _NAMES)
    return {name: Expected(saved[name].shape, (saved[name].dtype,)) for name in names if name in saved}
