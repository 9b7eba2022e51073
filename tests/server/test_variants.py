"""Each config loads, answers, and is the one that design and benchmarks think it is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from server.crowd import FULL_SET, in_one_batch
from server.fleet import Fleet
from server.servers import Statistics, facts, get_json
from server.wires import WIRES, ask
from triton_local.server import LocalTriton

MAX_BATCH_SIZE = {"default": 32, "batched_int8": 8, "batched_fp16": 8, "naive_fp16": 1}
PREFERRED = {"default": [4, 8, 16, 32], "batched_int8": [4, 8], "batched_fp16": [4, 8]}
INT8 = ("default", "batched_int8")


@pytest.fixture(params=list(MAX_BATCH_SIZE), scope="module")
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(variant: str, fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[LocalTriton]:
    if variant == "default":
        yield request.getfixturevalue("triton")
    else:
        with fleet.server(variant) as own:
            yield own


def test_the_live_config_is_the_variants(server: LocalTriton, variant: str) -> None:
    live: dict[str, Any] = get_json(server, "/v2/models/llama/config")
    assert live["max_batch_size"] == MAX_BATCH_SIZE[variant]
    assert ("dynamic_batching" in live) == (variant in PREFERRED)
    if variant in PREFERRED:
        batching = live["dynamic_batching"]
        assert batching["preferred_batch_size"] == PREFERRED[variant]
        assert int(batching["max_queue_delay_microseconds"]) == 10_000
    settings = {name: value["string_value"] for name, value in live["parameters"].items()}
    assert settings["quantization"] == ("int8" if variant in INT8 else "none")
    assert not live.get("model_transaction_policy", {}).get("decoupled", False)


def test_the_weights_read_back_are_the_variants(server: LocalTriton, variant: str) -> None:
    line = facts(server)
    # All seven linear layers of each of the six blocks; the head stays unquantized.
    expected = "1 in float32, 42 in int8" if variant in INT8 else "43 in float16"
    assert f"linear layers {expected}" in line


def test_all_four_ways_answer_within_the_variants_batches(server: LocalTriton, variant: str) -> None:
    statistics = Statistics(server)
    request = {**FULL_SET, "text_input": "Return a list of the", "max_tokens": 6, "min_tokens": 6, "seed": 3}
    answers = in_one_batch(server, [partial(ask, server, wire, **request) for wire in WIRES])
    assert [answer.num_output_tokens for answer in answers] == [6] * 4
    assert answers == [answers[0]] * 4
    assert max(statistics.batches()) <= MAX_BATCH_SIZE[variant]
