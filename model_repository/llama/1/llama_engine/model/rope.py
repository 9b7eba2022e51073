"""The tables of RoPE: cosine and sine for each position and frequency.

The float32 arithmetic of transformers' LlamaRotaryEmbedding is reproduced, so that the tables have the same bits.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from llama_engine.errors import CheckpointError
from llama_engine.model.heads import head_dim

if TYPE_CHECKING:
    from transformers import LlamaConfig

SUPPORTED = ("default", "linear", "llama3", "yarn")
"""Supported types of RoPE: those whose frequencies don't depend on the longest sequence of a batch."""


def rope_tables(config: LlamaConfig, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine, float32 [positions, head_dim / 2] each.

    Column i rotates dimensions i and i + head_dim / 2 of a head.
    Raises CheckpointError for a type of RoPE that isn't supported.
    """
    frequencies, scale = _frequencies(config)
    angles = torch.arange(positions)[:, None].float() * frequencies
    return angles.cos() * scale, angles.sin() * scale


def _frequencies(config: LlamaConfig) -> tuple[torch.Tensor, float]:
    """Return the frequencies in radians per position, float32 [head_dim / 2], and a factor for cosine and sine."""
    parameters: dict[str, Any] = dict(config.rope_parameters or {})
    kind = parameters.get("rope_type")
    if kind not in SUPPORTED:
        raise CheckpointError(f"rope_parameters.rope_type is {kind!r}; this engine serves {', '.join(SUPPORTED)}")
    # As in transformers, the default type ignores the factor.
    if kind != "default" and (share := parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError(f"rope_parameters.partial_rotary_factor is {share}; this engine serves 1")
    if kind in ("linear", "yarn"):
        # Imported here because only these types need the module.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        return ROPE_INIT_FUNCTIONS[kind](config)
    dim = head_dim(config)
    frequencies = 1.0 / (parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    return (_llama3(frequencies, parameters) if kind == "llama3" else frequencies), 1.0


def _llama3(frequencies: torch.Tensor, parameters: dict[str, Any]) -> torch.Tensor:
    """Return Llama 3's scaled frequencies: low ones divided by a factor, high ones unchanged, a ramp in between."""
    factor, positions = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    scaled = torch.where(waves > positions / low, frequencies / factor, frequencies)
    share = (positions / waves - low) / (high - low)
    between = ~(waves < positions / high) & ~(waves > positions / low)
    return torch.where(between, (1 - share) * scaled / factor + share * scaled, scaled)
