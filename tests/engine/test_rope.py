"""The RoPE tables have the bits of transformers' rotary embedding."""

from __future__ import annotations

import pytest
import torch
from llama_engine.checkpoint.architecture import read_architecture
from llama_engine.checkpoint.rope import RopeTables, max_positions, rope_tables
from llama_engine.errors import CheckpointError
from transformers import Gemma3TextConfig, LlamaConfig, Olmo3Config, Phi3Config, PreTrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + index / 50 for index in range(24)],
    "long_factor": [1.2**index for index in range(24)],
}
FULL, SLIDING = "full_attention", "sliding_attention"


def _config(head_dim: int = 64, **parameters: object) -> LlamaConfig:
    rope = {"rope_type": "default", "rope_theta": 10000.0, **parameters}
    return LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=4096, rope_parameters=rope
    )


def _phi3(**parameters: object) -> Phi3Config:
    rope = {"rope_theta": 10000.0, **parameters}
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "original_max_position_embeddings": 512}
    return Phi3Config(**sizes, max_position_embeddings=4096, rope_parameters=rope)  # type: ignore[arg-type]


def _tables(config: PreTrainedConfig, max_model_len: int) -> RopeTables:
    return rope_tables(config, read_architecture(config, "it"), max_model_len)


def _assert_tables(
    tables: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor], positions: int
) -> None:
    for half, table in zip(tables, expected, strict=True):
        assert half.dtype == torch.float32
        assert half.shape == (positions + 1, table.shape[-1] // 2)
        # transformers has each frequency twice.
        assert torch.equal(torch.cat((half, half), dim=-1)[:positions], table[0])


@pytest.mark.parametrize("head_dim", [4, 6, 64, 80, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"rope_theta": 500000.0},
        {"partial_rotary_factor": 0.5},
        {**LLAMA3, "rope_theta": 500000.0, "original_max_position_embeddings": 8192},
        {**LLAMA3, "original_max_position_embeddings": 64},
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "dynamic", "factor": 2.5},
        {**YARN, "original_max_position_embeddings": 1024},
        {**YARN, "original_max_position_embeddings": 1024, "attention_factor": 0.8, "beta_fast": 16.0},
    ],
    ids=str,
)
def test_the_tables_are_those_of_transformers_bit_for_bit(head_dim: int, parameters: dict[str, object]) -> None:
    config = _config(head_dim, **parameters)
    for positions in (1, 7, 4096, 4099):
        expected = LlamaRotaryEmbedding(config)(torch.empty(0), torch.arange(positions)[None])
        _assert_tables(_tables(config, positions)["default"], expected, positions)


@pytest.mark.parametrize("positions", [7, 512, 513, 4096])
@pytest.mark.parametrize(
    "parameters",
    [{}, {"partial_rotary_factor": 0.5}, LONGROPE, {**LONGROPE, "factor": 8.0}, {**LONGROPE, "attention_factor": 1.3}],
    ids=str,
)
def test_the_tables_of_a_part_of_the_head_are_those_of_transformers(
    positions: int, parameters: dict[str, object]
) -> None:
    config = _phi3(**parameters)
    expected = Phi3RotaryEmbedding(config)(torch.empty(0), torch.arange(positions)[None])
    _assert_tables(_tables(config, positions)["default"], expected, positions)


@pytest.mark.parametrize(
    ("config", "embedding"),
    [
        (
            Gemma3TextConfig(
                num_hidden_layers=6,
                head_dim=32,
                rope_parameters={
                    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                },
            ),
            Gemma3RotaryEmbedding,
        ),
        (
            Olmo3Config(
                num_hidden_layers=4,
                rope_parameters={
                    FULL: {**YARN, "rope_theta": 5e5, "original_max_position_embeddings": 512},
                    SLIDING: {"rope_type": "default", "rope_theta": 5e5},
                },
            ),
            Olmo3RotaryEmbedding,
        ),
    ],
    ids=["gemma3", "olmo3"],
)
def test_the_tables_of_each_kind_of_layer_are_those_of_transformers(
    config: PreTrainedConfig, embedding: type[Gemma3RotaryEmbedding | Olmo3RotaryEmbedding]
) -> None:
    tables, rotary = _tables(config, 700), embedding(config)  # type: ignore[arg-type]  # each has its own config
    assert set(tables) == {FULL, SLIDING}
    for kind in tables:
        _assert_tables(tables[kind], rotary(torch.empty(0), torch.arange(700)[None], kind), 700)


def test_a_row_does_not_depend_on_the_number_of_positions() -> None:
    for short, long in zip(_tables(_config(), 12)["default"], _tables(_config(), 4096)["default"], strict=True):
        assert torch.equal(short, long[:13])


def test_only_dynamic_rope_extends_the_positions() -> None:
    assert max_positions(_config(rope_type="dynamic", factor=2.0)) == 8192
    assert max_positions(_config(rope_type="linear", factor=2.0)) == 4096


@pytest.mark.parametrize("kind", ["proportional", "axial", None])
def test_a_type_that_is_not_supported_is_refused_by_name(kind: str | None) -> None:
    config = _config()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(CheckpointError) as refused:
        _tables(config, 8)
    assert str(refused.value) == (
        f"rope_parameters.rope_type is {kind!r}; this engine serves default, linear, dynamic, yarn, longrope, llama3"
    )


def test_a_rotation_of_a_part_of_the_head_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match=r"^rope_parameters\.partial_rotary_factor is 0\.5; this engine serves 1$"
    ):
        _tables(_config(rope_type="linear", factor=2.0, partial_rotary_factor=0.5), 8)
