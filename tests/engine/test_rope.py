"""The RoPE tables have the bits of transformers' rotary embedding."""

from __future__ import annotations

import pytest
import torch
from llama_engine.errors import CheckpointError
from llama_engine.model.rope import rope_tables
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}


def _config(head_dim: int = 64, **parameters: object) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    return LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=4096, rope_parameters=rope
    )


@pytest.mark.parametrize("head_dim", [2, 6, 64, 80, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"rope_theta": 500000.0},
        {"partial_rotary_factor": 0.5},
        {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        {**LLAMA3, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 2.5},
        {**YARN, "original_max_position_embeddings": 1024},
        {**YARN, "original_max_position_embeddings": 1024, "attention_factor": 0.8, "beta_fast": 16.0},
    ],
    ids=str,
)
def test_the_tables_are_those_of_transformers_bit_for_bit(head_dim: int, parameters: dict[str, object]) -> None:
    config = _config(head_dim, **parameters)
    embedding = LlamaRotaryEmbedding(config)
    for positions in (1, 7, 4096, 4099):
        cosine, sine = rope_tables(config, positions)
        assert cosine.dtype == sine.dtype == torch.float32
        expected = embedding(torch.empty(0), torch.arange(positions)[None])
        for half, table in zip((cosine, sine), expected, strict=True):
            assert half.shape == (positions, head_dim // 2)
            # transformers has each frequency twice.
            assert torch.equal(torch.cat((half, half), dim=-1), table[0])


def test_a_row_does_not_depend_on_the_number_of_positions() -> None:
    for short, long in zip(rope_tables(_config(), 13), rope_tables(_config(), 4096), strict=True):
        assert torch.equal(short, long[:13])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional"])
def test_a_type_that_is_not_supported_is_refused_by_name(kind: str) -> None:
    config = _config()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(CheckpointError) as refused:
        rope_tables(config, 8)
    assert str(refused.value) == (
        f"rope_parameters.rope_type is {kind!r}; this engine serves default, linear, llama3, yarn"
    )


def test_a_rotation_of_a_part_of_the_head_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"^rope_parameters\.partial_rotary_factor is 0\.5; this engine serves 1$"
    ):
        rope_tables(_config(rope_type="linear", factor=2.0, partial_rotary_factor=0.5), 8)
