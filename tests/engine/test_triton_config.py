"""What the model reads of Triton's config: settings, instance names, and how long a request may wait for a slot."""

import math
import time
from typing import Any

import pytest
from llama_engine.triton.config import QueuePolicy, gpu_of, instance_name, num_instances, settings_parameters

HOUR = 3600 * 1_000_000
LIMIT = {"default_timeout_microseconds": HOUR}
OVERRIDE = {"allow_timeout_override": True}


def _policy(policy: object) -> QueuePolicy:
    return QueuePolicy.of({"dynamic_batching": {"default_queue_policy": policy}})


def test_the_parameters_of_the_backend_itself_are_no_settings() -> None:
    values = {"quantization": "int8", "EXECUTION_ENV_PATH": "/env.tar.gz", "FORCE_CPU_ONLY_INPUT_TENSORS": "no"}
    assert settings_parameters({"parameters": {name: {"string_value": value} for name, value in values.items()}}) == {
        "quantization": "int8"
    }
    assert settings_parameters({}) == {}


def test_every_instance_has_a_name_of_its_own() -> None:
    """Triton gives instances of one group on several GPUs the same name."""
    instances = [
        {"model_instance_name": "llama_0_0", "model_instance_kind": kind, "model_instance_device_id": gpu}
        for kind, gpu in (("CPU", "0"), ("GPU", "0"), ("GPU", "1"))
    ]
    assert [instance_name(args) for args in instances] == ["llama_0_0", "llama_0_0_gpu0", "llama_0_0_gpu1"]
    assert [gpu_of(args) for args in instances] == [None, 0, 1]


def test_instances_are_counted_over_groups_and_gpus() -> None:
    groups = [{"count": 2, "gpus": []}, {"count": 2, "gpus": [0, 1]}]
    assert [num_instances({"instance_group": groups[:count]}) for count in (1, 2)] == [2, 6]


@pytest.mark.parametrize(
    ("policy", "timeout", "microseconds"),
    [
        ({"max_queue_size": 4}, 5, math.inf),
        # A request that the policy delays isn't rejected.
        (LIMIT | OVERRIDE | {"timeout_action": "DELAY"}, 5, math.inf),
        (LIMIT, 0, HOUR),
        ({"default_timeout_microseconds": str(HOUR)}, 0, HOUR),  # 64 bits are strings in protobuf's JSON
        (LIMIT, HOUR // 2, HOUR),  # may not override
        (LIMIT | OVERRIDE, HOUR // 2, HOUR // 2),
        (LIMIT | OVERRIDE, HOUR * 2, HOUR),  # only shorten
        (OVERRIDE, HOUR, HOUR),
    ],
)
def test_the_deadline_is_the_configs_timeout_or_a_shorter_one_of_the_request(
    policy: dict[str, Any], timeout: int, microseconds: float
) -> None:
    before = time.monotonic()
    deadline = _policy(policy).deadline(timeout)
    assert before <= deadline - microseconds / 1e6 <= time.monotonic() or deadline == microseconds


def test_without_a_queue_policy_there_is_no_limit() -> None:
    configs: list[dict[str, Any]] = [{}, {"dynamic_batching": {}}, {"dynamic_batching": None}]
    for config in configs:
        assert QueuePolicy.of(config) == QueuePolicy(default_timeout=math.inf, size=0)
    assert [_policy({"max_queue_size": size}).size for size in (4, "4")] == [4, 4]
