"""The configs differ where design's table says they do, and nowhere else; their inputs and outputs are the contract.

What Triton makes of them is tests/server's business; here they are read with Triton's own protobuf.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from llama_engine.settings import Settings
from tritonclient.grpc.model_config_pb2 import (
    TYPE_BOOL,
    TYPE_FP32,
    TYPE_INT32,
    TYPE_STRING,
    TYPE_UINT64,
    DataType,
    ModelConfig,
)

MODEL = Path(__file__).resolve().parents[2] / "model_repository" / "llama"

INPUTS = {
    "text_input": (TYPE_STRING, [1]),
    "max_tokens": (TYPE_INT32, [1]),
    "min_tokens": (TYPE_INT32, [1]),
    "temperature": (TYPE_FP32, [1]),
    "top_k": (TYPE_INT32, [1]),
    "top_p": (TYPE_FP32, [1]),
    "repetition_penalty": (TYPE_FP32, [1]),
    "frequency_penalty": (TYPE_FP32, [1]),
    "presence_penalty": (TYPE_FP32, [1]),
    "seed": (TYPE_UINT64, [1]),
    "stop_words": (TYPE_STRING, [-1]),
    "bad_words": (TYPE_STRING, [-1]),
    "stream": (TYPE_BOOL, [1]),
    "exclude_input_in_output": (TYPE_BOOL, [1]),
    "return_finish_reason": (TYPE_BOOL, [1]),
    "return_num_input_tokens": (TYPE_BOOL, [1]),
    "return_num_output_tokens": (TYPE_BOOL, [1]),
}
OUTPUTS = {
    "text_output": (TYPE_STRING, [1]),
    "finish_reason": (TYPE_STRING, [1]),
    "num_input_tokens": (TYPE_INT32, [1]),
    "num_output_tokens": (TYPE_INT32, [1]),
}
INFLIGHT = {"quantization": "int8", "scheduling": "inflight"}
INT8 = {"quantization": "int8", "scheduling": "batch"}
FP16 = {"quantization": "none", "dtype": "float16", "scheduling": "batch"}

# max_batch_size, preferred batch sizes (none: no dynamic batching), settings.
TABLE = {
    "config": (32, [4, 8, 16, 32], INFLIGHT),
    "streaming": (32, [4, 8, 16, 32], INFLIGHT),
    "batched_int8": (8, [4, 8], INT8),
    "batched_fp16": (8, [4, 8], FP16),
    "naive_fp16": (1, None, FP16),
}
FILES = {path.stem: path for path in (MODEL / "config.pbtxt", *MODEL.glob("configs/*"))}


def _read(name: str) -> ModelConfig:
    config = ModelConfig()
    text_format.Parse(FILES[name].read_text(), config)
    return config


def _settings(config: ModelConfig) -> dict[str, str]:
    return {name: parameter.string_value for name, parameter in config.parameters.items()}


def test_the_configs_are_those_of_the_table() -> None:
    assert set(FILES) == set(TABLE)
    assert {path.suffix for path in FILES.values()} == {".pbtxt"}


@pytest.mark.parametrize("name", TABLE)
def test_a_config_is_its_row_of_the_table(name: str) -> None:
    config = _read(name)
    max_batch_size, preferred, settings = TABLE[name]
    assert config.max_batch_size == max_batch_size
    assert config.HasField("dynamic_batching") == (preferred is not None)
    assert list(config.dynamic_batching.preferred_batch_size) == (preferred or [])
    assert config.dynamic_batching.max_queue_delay_microseconds == (0 if preferred is None else 10_000)
    assert config.model_transaction_policy.decoupled == (name == "streaming")
    assert _settings(config) == settings


@pytest.mark.parametrize("name", TABLE)
def test_apart_from_their_row_all_configs_are_one(name: str) -> None:
    configs = [_read("config"), _read(name)]
    for config in configs:
        config.ClearField("max_batch_size")
        config.ClearField("dynamic_batching")
        config.ClearField("model_transaction_policy")
        config.ClearField("parameters")
    assert configs[0] == configs[1]


def test_inputs_and_outputs_are_the_contracts() -> None:
    config = _read("config")
    assert {item.name: (item.data_type, list(item.dims)) for item in config.input} == INPUTS
    assert {item.name: (item.data_type, list(item.dims)) for item in config.output} == OUTPUTS
    assert len(config.input) == len(INPUTS)
    assert [item.name for item in config.input if not item.optional] == ["text_input"]


def test_inputs_of_any_length_do_not_split_batches() -> None:
    for item in _read("config").input:
        assert item.allow_ragged_batch == (-1 in item.dims), f"{item.name}: {DataType.Name(item.data_type)}"


@pytest.mark.parametrize("name", [name for name, (_, preferred, _) in TABLE.items() if preferred is not None])
def test_a_queue_and_the_time_in_it_are_bounded(name: str) -> None:
    batching = _read(name).dynamic_batching
    policy = batching.default_queue_policy
    # One for all, so that the product and its baselines are compared under the same load.
    assert policy == _read("config").dynamic_batching.default_queue_policy
    assert policy.timeout_action == policy.REJECT
    assert policy.allow_timeout_override
    # Several turns of the product's slots; and a time that nobody's client reaches by waiting for its turn.
    assert policy.max_queue_size == 8 * TABLE["config"][0]
    assert policy.default_timeout_microseconds == 600 * 1_000_000
    # Levels of priority would each have a queue of their own, with a policy of its own.
    assert batching.priority_levels == 0


def test_no_config_is_bound_to_a_gpu() -> None:
    (group,) = _read("config").instance_group
    assert group.kind == group.KIND_AUTO
    assert group.count == 1


@pytest.mark.parametrize("name", TABLE)
def test_the_parameters_are_settings_that_the_engine_takes(name: str) -> None:
    settings = _settings(_read(name))
    parsed = Settings.parse(settings, {})
    assert {key: str(getattr(parsed, key)) for key in settings} == settings
