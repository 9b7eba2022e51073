"""The configs differ only where the design's table differs; inputs and outputs are the contract with clients."""

import pytest
from engine.configs import FILES, read_config
from llama_engine.settings import Settings
from tritonclient.grpc.model_config_pb2 import DataType, ModelInput

INFLIGHT = {"quantization": "int8", "scheduling": "inflight"}
INT8 = {"quantization": "int8", "scheduling": "batch"}
FP16 = {"quantization": "none", "dtype": "float16", "scheduling": "batch"}

# max_batch_size, preferred batch sizes (none: no dynamic batching), the delay in microseconds, settings.
TABLE: dict[str, tuple[int, list[int], int, dict[str, str]]] = {
    "config": (32, [4, 8, 16, 32], 1_000, INFLIGHT),
    "streaming": (32, [4, 8, 16, 32], 1_000, INFLIGHT),
    "batched_int8": (8, [4, 8], 10_000, INT8),
    "batched_fp16": (8, [4, 8], 10_000, FP16),
    "naive_fp16": (1, [], 0, FP16),
}

WIRE = {
    "STRING": "text_input logit_bias guided_decoding_guide_type guided_decoding_guide cache_salt prediction "
    "sampling_parameters",
    "STRING list": "embedding_bias_words stop_words stop bad_words",
    "INT32": "max_tokens min_tokens min_length top_k n num_return_sequences end_id priority stream_interval_ms "
    "num_logprobs prompt_logprobs pad_id beam_width",
    "INT32 list": "input_ids allowed_token_ids stop_token_ids",
    "FP32": "temperature top_p min_p repetition_penalty frequency_penalty presence_penalty length_penalty",
    "FP32 list": "embedding_bias_weights",
    "UINT64": "seed random_seed",
    "BOOL": "truncate_max_tokens ignore_eos stream exclude_input_in_output return_log_probs return_perf_metrics "
    "return_finish_reason return_num_input_tokens return_num_output_tokens",
}
"""Inputs by type; others may be added."""


def test_the_configs_are_those_of_the_table() -> None:
    assert set(FILES) == set(TABLE)
    assert {path.suffix for path in FILES.values()} == {".pbtxt"}


@pytest.mark.parametrize("name", TABLE)
def test_a_config_is_the_default_one_but_for_its_row_of_the_table(name: str) -> None:
    config, default = read_config(name), read_config("config")
    max_batch_size, preferred, delay, settings = TABLE[name]
    assert config.max_batch_size == max_batch_size
    assert config.HasField("dynamic_batching") == bool(preferred)
    assert list(config.dynamic_batching.preferred_batch_size) == preferred
    assert config.dynamic_batching.max_queue_delay_microseconds == delay
    assert config.model_transaction_policy.decoupled == (name == "streaming")
    # The same queue for all, so that the product and its baselines are compared under the same load.
    policies = [each.dynamic_batching.default_queue_policy for each in (config, default)]
    assert policies[0] == policies[1] or not preferred
    values = {key: parameter.string_value for key, parameter in config.parameters.items()}
    assert values == settings
    parsed = Settings.parse(values, {})
    assert {key: str(getattr(parsed, key)) for key in values} == values
    for message in (config, default):
        for field in ("max_batch_size", "dynamic_batching", "model_transaction_policy", "parameters"):
            message.ClearField(field)
    assert config == default


def test_every_input_that_clients_know_has_its_type() -> None:
    wire = {f"{name} {kind}" for kind, names in WIRE.items() for name in names.split()}
    assert wire <= {_line(item) for item in read_config("config").input}


def _line(item: ModelInput) -> str:
    # Without allow_ragged_batch, inputs of unequal length split a batch.
    is_list = (list(item.dims), item.allow_ragged_batch) == ([-1], True)
    assert is_list or (list(item.dims), item.allow_ragged_batch) == ([1], False), item.name
    return f"{item.name} {DataType.Name(item.data_type).removeprefix('TYPE_')}{' list' * is_list}"


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
