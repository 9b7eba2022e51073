"""The deadline of a request in the queue: from the config's policy and from the request's own timeout."""

import math
import time
from typing import Any

import pytest
from llama_engine.triton.config import QueuePolicy

HOUR = 3600 * 1_000_000


def _config(**policy: object) -> dict[str, Any]:
    return {"dynamic_batching": {"default_queue_policy": policy}}


@pytest.mark.parametrize(
    "config", [{}, {"dynamic_batching": {}}, {"dynamic_batching": None}, _config(max_queue_size=4)]
)
@pytest.mark.parametrize("timeout", [0, 5])
def test_without_a_timeout_in_the_config_there_is_no_deadline(config: dict[str, Any], timeout: int) -> None:
    assert QueuePolicy.of(config).deadline(timeout) == math.inf


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
def test_a_request_may_shorten_the_configs_timeout_if_allowed(
    policy: dict[str, Any], timeout: int, microseconds: int
) -> None:
    before = time.monotonic()
    deadline = QueuePolicy.of(_config(**policy)).deadline(timeout)
    assert before <= deadline - microseconds / 1e6 <= time.monotonic()


def test_the_queue_has_the_configs_size() -> None:
    assert QueuePolicy.of(_config(max_queue_size=4)).size == 4
    assert QueuePolicy.of(_config(max_queue_size="4")).size == 4
    assert QueuePolicy.of({}).size == QueuePolicy.of(_config(default_timeout_microseconds=10)).size == 0


@pytest.mark.parametrize("timeout", [0, 5])
def test_a_request_to_be_delayed_has_no_deadline(timeout: int) -> None:
    policy = _config(default_timeout_microseconds=10, timeout_action="DELAY", allow_timeout_override=True)
    assert QueuePolicy.of(policy).deadline(timeout) == math.inf
