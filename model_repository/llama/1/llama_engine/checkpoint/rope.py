"""The tables of RoPE: cosine and sine for each position and frequency, by the kind of RoPE that a layer has.

They have the bits of the rotary embeddings in transformers. Two types of RoPE have frequencies that depend there on the
longest sequence of a batch. Here they depend on max_model_len alone, so that a sequence's keys don't change while it
grows, and other sequences can share them:

| type | frequencies |
|---|---|
| dynamic | those of a sequence of max_model_len tokens |
| longrope | the short factors up to original_max_position_embeddings, else the long ones |
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from llama_engine.bounds import show
from llama_engine.checkpoint.architecture import ROPE, Architecture
from llama_engine.errors import CheckpointError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SUPPORTED = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")
"""Supported types of RoPE."""

RopeTables = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""Cosine and sine, [positions, rotary / 2] each, by the kinds in `Architecture.ropes`."""

_log = logging.getLogger(__name__)


def max_positions(config: PreTrainedConfig) -> int:
    """Return the largest max_model_len that the model supports: dynamic RoPE extends max_position_embeddings."""
    parameters, positions = dict(config.rope_parameters or {}), int(config.max_position_embeddings)
    return int(parameters["factor"] * positions) if parameters.get("rope_type") == "dynamic" else positions


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Return whether the tables depend on max_model_len."""
    parameters = dict(config.rope_parameters or {})
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def rope_tables(config: PreTrainedConfig, architecture: Architecture, max_model_len: int) -> RopeTables:
    """Return cosine and sine for max_model_len positions, and one more for padding rows, in float32.

    Column i rotates dimensions i and i + rotary / 2 of a head.
    Raises CheckpointError for a type of RoPE that isn't supported, and for parameters that give no frequencies.
    """
    tables = {}
    for kind in sorted({kind for kind in architecture.ropes if kind is not None}):
        try:
            frequencies, scale = _frequencies(config, architecture, kind, max_model_len)
        except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(f"rope_parameters are {show(config.rope_parameters)}: {one_line(error)}") from error
        if not (frequencies.isfinite().all() and math.isfinite(scale)):
            raise CheckpointError(f"rope_parameters are {show(config.rope_parameters)}: a frequency isn't finite")
        angles = torch.arange(max_model_len + 1)[:, None].float() * frequencies
        tables[kind] = angles.cos() * scale, angles.sin() * scale
    return tables


def _frequencies(
    config: PreTrainedConfig, architecture: Architecture, kind: str, max_model_len: int
) -> tuple[torch.Tensor, float]:
    """Return the frequencies in radians per position, float32 [rotary / 2], and a factor for cosine and sine."""
    # Imported here because importing transformers takes time, and callers have it loaded already.
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    all_parameters: dict[str, Any] = dict(config.rope_parameters or {})
    parameters = all_parameters if kind == ROPE else all_parameters.get(kind) or {}
    name = parameters.get("rope_type")
    if name not in SUPPORTED:
        raise CheckpointError(f"rope_parameters.rope_type is {name!r}; this engine serves {', '.join(SUPPORTED)}")
    if name == "default":
        # As in transformers, this type rotates whole heads in families without partial rotation.
        exponents = torch.arange(0, architecture.rotary, 2, dtype=torch.float32) / architecture.rotary
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    length: int | torch.Tensor | None = max_model_len
    if name == "dynamic":
        # As in transformers, computed from a tensor beyond the trained positions, and from a number up to them.
        positions = config.max_position_embeddings
        length = torch.tensor(max_model_len) if max_model_len > positions else None
        growth = parameters["factor"] * max(max_model_len, positions) / positions - (parameters["factor"] - 1)
        _log.info("dynamic RoPE is fixed at max_model_len %d: its base grows with %.3g", max_model_len, growth)
    layer_type = {} if kind == ROPE else {"layer_type": kind}
    frequencies, scale = ROPE_INIT_FUNCTIONS[name](config, None, seq_len=length, **layer_type)
    if 2 * len(frequencies) != architecture.rotary:
        share = parameters.get("partial_rotary_factor", 1.0)
        raise CheckpointError(f"rope_parameters.partial_rotary_factor is {share}; this engine serves 1")
    return frequencies, scale
