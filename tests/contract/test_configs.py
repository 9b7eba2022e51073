"""The configs differ only where the design's table differs; inputs and outputs are the contract with clients."""

from __future__ import annotations

import pytest
from contract.configs import FILES, INPUTS, OUTPUTS, read_config
from llama_engine.settings import Settings
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

INFLIGHT = {"quantization": "int8", "scheduling": "inflight"}
INT8 = {"quantization": "int8", "scheduling": "batch"}
FP16 = {"quantization": "none", "dtype": "float16", "scheduling": "batch"}

# max_batch_size, preferred batch sizes (None: no dynamic batching), settings.
TABLE = {
    "config": (32, [4, 8, 16, 32], INFLIGHT),
    "streaming": (32, [4, 8, 16, 32], INFLIGHT),
    "batched_int8": (8, [4, 8], INT8),
    "batched_fp16": (8, [4, 8], FP16),
    "naive_fp16": (1, None, FP16),
}
each_config = pytest.mark.parametrize("name", TABLE)


def _settings(config: ModelConfig) -> dict[str, str]:
    return {name: parameter.string_value for name, parameter in config.parameters.items()}


def test_the_configs_are_those_of_the_table() -> None:
    assert set(FILES) == set(TABLE)
    assert {path.suffix for path in FILES.values()} == {".pbtxt"}


@each_config
def test_a_config_is_its_row_of_the_table(name: str) -> None:
    config = read_config(name)
    max_batch_size, preferred, settings = TABLE[name]
    assert config.max_batch_size == max_batch_size
    assert config.HasField("dynamic_batching") == (preferred is not None)
    assert list(config.dynamic_batching.preferred_batch_size) == (preferred or [])
    assert config.dynamic_batching.max_queue_delay_microseconds == (0 if preferred is None else 10_000)
    assert config.model_transaction_policy.decoupled == (name == "streaming")
    assert _settings(config) == settings


@each_config
def test_configs_are_equal_apart_from_their_row(name: str) -> None:
    configs = [read_config("config"), read_config(name)]
    for config in configs:
        for field in ("max_batch_size", "dynamic_batching", "model_transaction_policy", "parameters"):
            config.ClearField(field)
    assert configs[0] == configs[1]


def test_inputs_and_outputs_are_the_contracts() -> None:
    config = read_config("config")
    assert {item.name: (item.data_type, list(item.dims)) for item in config.input} == INPUTS
    assert {item.name: (item.data_type, list(item.dims)) for item in config.output} == OUTPUTS
    assert len(config.input) == len(INPUTS)
    assert [item.name for item in config.input if not item.optional] == ["text_input"]


def test_inputs_of_any_length_do_not_split_batches() -> None:
    for item in read_config("config").input:
        assert item.allow_ragged_batch == (-1 in item.dims), f"{item.name}: {DataType.Name(item.data_type)}"


@pytest.mark.parametrize("name", [name for name, (_, preferred, _) in TABLE.items() if preferred is not None])
def test_queue_length_and_time_in_the_queue_are_bounded(name: str) -> None:
    batching = read_config(name).dynamic_batching
    policy = batching.default_queue_policy
    # The same for all, so that the product and its baselines are compared under the same load.
    assert policy == read_config("config").dynamic_batching.default_queue_policy
    assert policy.timeout_action == policy.REJECT
    assert policy.allow_timeout_override
    # Eight times the product's slots, and longer than a client waits for its turn.
    assert policy.max_queue_size == 8 * TABLE["config"][0]
    assert policy.default_timeout_microseconds == 600 * 1_000_000
    # Each priority level would have its own queue, with its own policy.
    assert batching.priority_levels == 0


def test_no_config_is_bound_to_a_gpu() -> None:
    (group,) = read_config("config").instance_group
    assert group.kind == group.KIND_AUTO
    assert group.count == 1


@each_config
def test_the_parameters_are_settings_of_the_engine(name: str) -> None:
    settings = _settings(read_config(name))
    parsed = Settings.parse(settings, {})
    assert {key: str(getattr(parsed, key)) for key in settings} == settings
