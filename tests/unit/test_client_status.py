"""The live configuration reads the same whichever protocol it came by."""

from __future__ import annotations

import pytest
from triton_llama import ServerError
from triton_llama.status import ModelConfig, read_config

EXPECTED = ModelConfig(
    backend="python",
    max_batch_size=32,
    dynamic_batching=True,
    preferred_batch_sizes=(4, 8),
    max_queue_delay_microseconds=10000,
    decoupled=False,
    parameters={"quantization": "int8", "scheduling": "batch"},
)


def test_http_config_is_read() -> None:
    config = {
        "backend": "python",
        "max_batch_size": 32,
        "dynamic_batching": {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": 10000},
        "model_transaction_policy": {"decoupled": False},
        "parameters": {"scheduling": {"string_value": "batch"}, "quantization": {"string_value": "int8"}},
    }
    assert read_config(config) == EXPECTED


def test_grpc_config_has_big_numbers_as_text_and_leaves_out_what_is_false() -> None:
    config = {
        "backend": "python",
        "max_batch_size": 32,
        "dynamic_batching": {"preferred_batch_size": [4, 8], "max_queue_delay_microseconds": "10000"},
        "parameters": {"scheduling": {"string_value": "batch"}, "quantization": {"string_value": "int8"}},
    }
    assert read_config(config) == EXPECTED


def test_a_config_without_a_batcher_is_not_said_to_have_one() -> None:
    config = read_config({"backend": "python", "max_batch_size": 1})
    assert not config.dynamic_batching
    assert config.preferred_batch_sizes == ()


@pytest.mark.parametrize("config", [{"backend": 3}, {"max_batch_size": "many"}, {"parameters": [1]}])
def test_a_config_that_is_not_tritons_is_the_servers_error(config: dict[str, object]) -> None:
    with pytest.raises(ServerError, match="the server's"):
        read_config(config)
