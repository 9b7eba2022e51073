"""The RoPE tables have the bits of transformers' rotary embedding."""

import pytest
import torch
from engine.gguf_files import LLAMA3
from llama_engine.checkpoint.architecture import read_architecture
from llama_engine.checkpoint.rope import RopeTables, max_positions, rope_tables
from llama_engine.errors import CheckpointError
from transformers import LlamaConfig, Phi3Config, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + index / 50 for index in range(24)],
    "long_factor": [1.2**index for index in range(24)],
}


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


@pytest.mark.parametrize(
    ("config", "embedding"),
    [
        (_config(head_dim=6), LlamaRotaryEmbedding),
        *((_config(**parameters), LlamaRotaryEmbedding) for parameters in (
            {"rope_theta": 500000.0},
            {"partial_rotary_factor": 0.5},
            LLAMA3,
            {"rope_type": "linear", "factor": 2.5},
            {"rope_type": "dynamic", "factor": 2.5},
            YARN,
            {**YARN, "attention_factor": 0.8, "beta_fast": 16.0},
        )),
        *((_phi3(**parameters), Phi3RotaryEmbedding) for parameters in (
            {"partial_rotary_factor": 0.5},
            LONGROPE,
            {**LONGROPE, "factor": 8.0},
            {**LONGROPE, "attention_factor": 1.3},
        )),
    ],
)  # fmt: skip
def test_the_tables_are_those_of_transformers_bit_for_bit(
    config: LlamaConfig | Phi3Config, embedding: type[LlamaRotaryEmbedding | Phi3RotaryEmbedding]
) -> None:
    for positions in (1, 512, 513, 4099):
        # Each of the two has its own config. transformers has each frequency twice.
        expected = embedding(config)(torch.empty(0), torch.arange(positions)[None])  # type: ignore[arg-type]
        for half, table in zip(_tables(config, positions)["default"], expected, strict=True):
            assert half.dtype == torch.float32
            assert half.shape == (positions + 1, table.shape[-1] // 2)
            assert torch.equal(torch.cat((half, half), dim=-1)[:positions], table[0])


def test_only_dynamic_rope_extends_the_positions() -> None:
    assert max_positions(_config(rope_type="dynamic", factor=2.0)) == 8192
    assert max_positions(_config(rope_type="linear", factor=2.0)) == 4096


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        *(({"rope_type": kind, "factor": 2.0},
           f"rope_type is {kind!r}; this engine serves default, linear, dynamic, yarn, longrope, llama3")
          for kind in ("axial", None)),
        ({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
         "partial_rotary_factor is 0.5; this engine serves 1"),
    ],
)  # fmt: skip
def test_rope_that_is_not_supported_is_refused_by_name(rope: dict[str, object], message: str) -> None:
    config = _config()
    config.rope_parameters = {"rope_theta": 1e4, **rope}
    with pytest.raises(CheckpointError) as refused:
        _tables(config, 8)
    assert str(refused.value) == f"rope_parameters.{message}"
