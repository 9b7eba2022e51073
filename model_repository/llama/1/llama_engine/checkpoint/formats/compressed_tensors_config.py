"""Reads a quantization config of compressed-tensors: what its weights are, and whether the engine serves the rest.

Source: `quantization/quant_config.py`, `quant_scheme.py` and `quant_args.py` of compressed-tensors 0.20.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_engine.bounds import show
from llama_engine.errors import CheckpointError

_FORMATS = ("int-quantized", "naive-quantized", "float-quantized", "pack-quantized", "mixed-precision", "dense")
_WEIGHTS = ("int4", "int8", "float8")

_log = logging.getLogger(__name__)


def weight_options(folder: Path, config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the options of the weights (`QuantizationArgs`) of each group of the config.

    Raises CheckpointError, naming the field, for a config that the engine doesn't serve; logs what it ignores.
    """
    sparsity, transforms = config.get("sparsity_config") or {}, config.get("transform_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise _refusal(folder, "sparsity_config.format", sparsity["format"], "serves dense weights")
    if kinds := [group.get("type") for group in (transforms.get("config_groups") or {}).values()]:
        raise _refusal(folder, "transform_config", kinds, "applies no transforms")
    _check_format(folder, config.get("format"))
    if config.get("kv_cache_scheme"):
        _log.warning("kv_cache_scheme is ignored: the setting kv_cache_dtype selects the KV cache's dtype")
    # A group of the config may also be a preset's name with its targets, whose layers' tensors say all.
    schemes = [scheme for scheme in (config.get("config_groups") or {}).values() if isinstance(scheme, dict)]
    for scheme in schemes:
        _check_scheme(folder, scheme)
    return [scheme["weights"] for scheme in schemes if scheme.get("weights")]


def _check_scheme(folder: Path, scheme: Mapping[str, Any]) -> None:
    weights, activations = scheme.get("weights"), scheme.get("input_activations") or {}
    _check_format(folder, scheme.get("format"))
    if weights and (kind := f"{weights.get('type', 'int')}{weights.get('num_bits', 8)}") not in _WEIGHTS:
        raise _refusal(folder, "weights", kind, f"reads {', '.join(_WEIGHTS)}")
    if not activations.get("symmetric", True):
        raise _refusal(folder, "input_activations.symmetric", False, "quantizes activations without zero points")


def _check_format(folder: Path, name: object) -> None:
    if name is not None and name not in _FORMATS:
        raise _refusal(folder, "format", name, f"reads {', '.join(_FORMATS)}")


def _refusal(folder: Path, field: str, value: object, does: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {field} is {show(value)}; this engine {does}")
