"""What the model reads of Triton's config: settings, instance names, and how long a request may wait for a slot."""

import math
import time
from typing import Any

import pytest
from llama_engine.triton.config import QueuePolicy, gpu_of, instance_name, is_decoupled, settings_parameters

HOUR = 3600 * 1_000_000
CPU = {"model_instance_name": "llama_0_0", "model_instance_kind": "CPU", "model_instance_device_id": "0"}


def _policy(**policy: object) -> QueuePolicy:
    return QueuePolicy.of({"dynamic_batching": {"default_queue_policy": policy}})


def test_the_parameters_of_the_backend_itself_are_no_settings() -> None:
    config = {
        "parameters": {
            "quantization": {"string_value": "int8"},
            "EXECUTION_ENV_PATH": {"string_value": "/env.tar.gz"},
            "FORCE_CPU_ONLY_INPUT_TENSORS": {"string_value": "no"},
        },
        "model_transaction_policy": {"decoupled": True},
    }
    assert settings_parameters(config) == {"quantization": "int8"}
    assert is_decoupled(config)
    assert settings_parameters({}) == {}
    assert not is_decoupled({})


def test_every_instance_has_a_name_of_its_own() -> None:
    """Triton gives instances of one group on several GPUs the same name."""
    gpus = [{**CPU, "model_instance_kind": "GPU", "model_instance_device_id": str(gpu)} for gpu in range(2)]
    instances = [CPU, *gpus]
    assert [instance_name(args) for args in instances] == ["llama_0_0", "llama_0_0_gpu0", "llama_0_0_gpu1"]
    assert [gpu_of(args) for args in instances] == [None, 0, 1]


@pytest.mark.parametrize(
    "policy",
    [
        QueuePolicy.of({}),
        QueuePolicy.of({"dynamic_batching": {}}),
        QueuePolicy.of({"dynamic_batching": None}),
        _policy(max_queue_size=4),
        # A request that the policy delays isn't rejected.
        _policy(default_timeout_microseconds=10, timeout_action="DELAY", allow_timeout_override=True),
    ],
)
@pytest.mark.parametrize("timeout", [0, 5])
def test_a_request_has_no_deadline_without_a_timeout_or_where_it_is_delayed(policy: QueuePolicy, timeout: int) -> None:
    assert policy.deadline(timeout) == math.inf


@pytest.mark.parametrize(
    ("policy", "timeout", "microseconds"),
    [
        ({"default_timeout_microseconds": HOUR}, 0, HOUR),
        ({"default_timeout_microseconds": str(HOUR)}, 0, HOUR),  # 64 bits are strings in protobuf's JSON
        ({"default_timeout_microseconds": HOUR}, HOUR // 2, HOUR),  # may not override
        ({"default_timeout_microseconds": HOUR, "allow_timeout_override": True}, HOUR // 2, HOUR // 2),
        ({"default_timeout_microseconds": HOUR, "allow_timeout_override": True}, HOUR * 2, HOUR),  # only shorten
        ({"default_timeout_microseconds": HOUR, "allow_timeout_override": True}, 0, HOUR),
        ({"allow_timeout_override": True}, HOUR, HOUR),
        ({"default_timeout_microseconds": HOUR, "timeout_action": "REJECT"}, 0, HOUR),
    ],
)
def test_the_deadline_is_the_configs_timeout_or_a_shorter_one_of_the_request(
    policy: dict[str, Any], timeout: int, microseconds: int
) -> None:
    before = time.monotonic()
    deadline = _policy(**policy).deadline(timeout)
    assert before <= deadline - microseconds / 1e6 <= time.monotonic()


def test_the_size_of_the_queue_is_read_and_defaults_to_no_limit() -> None:
    assert _policy(max_queue_size=4).size == _policy(max_queue_size="4").size == 4
    assert QueuePolicy.of({}).size == _policy(default_timeout_microseconds=10).size == 0
