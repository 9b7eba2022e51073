"""Triton's batches: each config forms its own, and every request of a batch gets the text that it gets alone."""

from __future__ import annotations

from functools import partial

import pytest
from end_to_end.batches import FULL_SET, in_one_batch
from end_to_end.servers import get_json, is_decoupled
from end_to_end.wires import WIRES, ask
from triton_local.server import LocalTriton

# A config with its batch size, preferred sizes, and the types of its linear layers: seven in each of six blocks, and
# the head, which stays unquantized.
CONFIGS = {
    "triton": (32, [4, 8, 16, 32], "43 in int8"),
    "batched_int8": (8, [4, 8], "43 in int8"),
    "batched_fp16": (8, [4, 8], "43 in float16"),
    "naive_fp16": (1, None, "43 in float16"),
}


each_config = pytest.mark.parametrize(
    ("server", "expected"),
    [pytest.param(*item, marks=[pytest.mark.long] * (item[0] != "triton")) for item in CONFIGS.items()],
    indirect=["server"],
    ids=CONFIGS,
)


@each_config
def test_a_config_is_live_as_named(server: LocalTriton, expected: tuple[int, list[int] | None, str]) -> None:
    max_batch_size, preferred, layers = expected
    live = get_json(server, "/v2/models/llama/config")
    assert live["max_batch_size"] == max_batch_size
    batching = live.get("dynamic_batching", {})
    assert batching.get("preferred_batch_size") == preferred
    assert not preferred or int(batching["max_queue_delay_microseconds"]) == (1_000 if max_batch_size == 32 else 10_000)
    assert live["parameters"]["quantization"]["string_value"] == ("int8" if "int8" in layers else "none")
    assert not is_decoupled(server)
    # The model's own line.
    assert f"linear layers {layers}" in server.log_text()


@each_config
def test_every_endpoint_gives_the_same_answer_in_a_batch(
    server: LocalTriton, expected: tuple[int, list[int] | None, str]
) -> None:
    request = {**FULL_SET, "text_input": "Return a list of the", "max_tokens": 6, "min_tokens": 6, "seed": 3}
    answers, batches = in_one_batch(server, [partial(ask, server, wire, **request) for wire in WIRES])
    assert [answer.num_output_tokens for answer in answers] == [6] * 4
    assert answers == [answers[0]] * 4
    assert max(batches) <= expected[0]
