"""The configs differ only where the design's table differs; inputs and outputs are the contract with clients."""

from __future__ import annotations

import pytest
from contract.configs import FILES, read_config
from llama_engine.api.fields import ALIASES, FIELDS
from llama_engine.settings import Settings
from tritonclient.grpc.model_config_pb2 import DataType

INFLIGHT = {"quantization": "int8", "scheduling": "inflight"}
INT8 = {"quantization": "int8", "scheduling": "batch"}
FP16 = {"quantization": "none", "dtype": "float16", "scheduling": "batch"}

# max_batch_size, preferred batch sizes (none: no dynamic batching), settings.
TABLE: dict[str, tuple[int, list[int], dict[str, str]]] = {
    "config": (32, [4, 8, 16, 32], INFLIGHT),
    "streaming": (32, [4, 8, 16, 32], INFLIGHT),
    "batched_int8": (8, [4, 8], INT8),
    "batched_fp16": (8, [4, 8], FP16),
    "naive_fp16": (1, [], FP16),
}


def test_the_configs_are_those_of_the_table() -> None:
    assert set(FILES) == set(TABLE)
    assert {path.suffix for path in FILES.values()} == {".pbtxt"}


@pytest.mark.parametrize("name", TABLE)
def test_a_config_is_the_default_one_but_for_its_row_of_the_table(name: str) -> None:
    config, default = read_config(name), read_config("config")
    max_batch_size, preferred, settings = TABLE[name]
    assert config.max_batch_size == max_batch_size
    assert config.HasField("dynamic_batching") == bool(preferred)
    assert list(config.dynamic_batching.preferred_batch_size) == preferred
    assert config.dynamic_batching.max_queue_delay_microseconds == (10_000 if preferred else 0)
    assert config.model_transaction_policy.decoupled == (name == "streaming")
    # The same queue for all, so that the product and its baselines are compared under the same load.
    policies = [one.dynamic_batching.default_queue_policy for one in (config, default)]
    assert policies[0] == policies[1] or not preferred
    given = {key: parameter.string_value for key, parameter in config.parameters.items()}
    assert given == settings
    parsed = Settings.parse(given, {})
    assert {key: str(getattr(parsed, key)) for key in given} == given
    for one in (config, default):
        for field in ("max_batch_size", "dynamic_batching", "model_transaction_policy", "parameters"):
            one.ClearField(field)
    assert config == default


def test_the_inputs_are_the_fields_and_their_aliases_all_optional() -> None:
    """The prompt may come as text or as tokens, so that neither can be required."""
    inputs = {item.name: item for item in read_config("config").input}
    assert set(inputs) == {*FIELDS, *ALIASES}
    for name, item in inputs.items():
        field = FIELDS[ALIASES.get(name, name)]
        assert DataType.Name(item.data_type) == f"TYPE_{field.type}", name
        assert list(item.dims) == ([-1] if field.is_list else [1]), name
        # Otherwise inputs of unequal length split a batch.
        assert item.allow_ragged_batch == field.is_list, name
        assert item.optional, name


def test_every_output_has_a_value_for_each_choice() -> None:
    assert {tuple(item.dims) for item in read_config("config").output} == {(-1,)}


def test_no_config_is_bound_to_a_gpu() -> None:
    (group,) = read_config("config").instance_group
    assert (group.kind, group.count) == (group.KIND_AUTO, 1)


def test_the_queue_is_bounded() -> None:
    batching = read_config("config").dynamic_batching
    policy = batching.default_queue_policy
    assert policy.timeout_action == policy.REJECT
    assert policy.allow_timeout_override
    # Eight times the product's slots, and longer than a client waits for its turn.
    assert policy.max_queue_size == 8 * TABLE["config"][0]
    assert policy.default_timeout_microseconds == 600 * 1_000_000
    # Each priority level would have its own queue, with its own policy.
    assert batching.priority_levels == 0
