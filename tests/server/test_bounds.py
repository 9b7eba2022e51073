"""What Triton itself bounds: rows, the queue, and the stack that a large body is parsed on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from functools import partial

import pytest
from server.crowd import FULL_SET, at_once
from server.servers import get_json, is_decoupled
from server.wires import BAD, TENSOR_WIRES, Refusal, ask, generate_url
from triton_local.server import LocalTriton

FORM = "application/x-www-form-urlencoded"
"""What curl -d says that a body is, whatever it is."""


def test_more_rows_than_a_batch_has_are_taken(triton: LocalTriton) -> None:
    rows = 33
    inputs: dict[str, list[list[object]]] = {
        "text_input": [["Return"]] * rows,
        "max_tokens": [[1]] * rows,
        "min_tokens": [[1]] * rows,
    }
    for wire in TENSOR_WIRES:
        refusal = wire(triton, inputs)
        assert isinstance(refusal, Refusal)
        assert refusal.kind == BAD
        assert "batch-size must be <= 32" in refusal.message
    most: dict[str, object] = {name: value[:-1] for name, value in inputs.items()}
    for answers in at_once([partial(wire, triton, most) for wire in TENSOR_WIRES]):
        assert not isinstance(answers, Refusal)
        assert [answer.num_output_tokens for answer in answers] == [1] * (rows - 1)


@pytest.mark.parametrize("config", ["triton", "streaming"])
def test_the_queue_has_no_bound_when_it_runs(config: str, request: pytest.FixtureRequest) -> None:
    server: LocalTriton = request.getfixturevalue(config)
    assert is_decoupled(server) == (config == "streaming")
    policy = get_json(server, "/v2/models/llama/config")["dynamic_batching"]["default_queue_policy"]
    assert policy["timeout_action"] == "REJECT"
    assert int(policy["default_timeout_microseconds"]) == 600_000_000
    assert policy["allow_timeout_override"] is True
    assert policy["max_queue_size"] == 256


@pytest.mark.parametrize("megabytes", [5, 10])
def test_a_large_form_overflows_the_stack_that_it_is_parsed_on(triton: LocalTriton, megabytes: int) -> None:
    """Without larger stacks this is signal 11 in tritonserver, from 4.2 MB on."""
    body = json.dumps({"text_input": "x " * (megabytes * 500_000)}).encode()
    asked = urllib.request.Request(generate_url(triton), data=body, headers={"Content-Type": FORM})
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(asked, timeout=120)
    with refused.value as error:
        assert error.code == 400
        assert f"text_input is a text of {megabytes}000000 bytes" in json.load(error)["error"]
    assert ask(triton, **FULL_SET, text_input="Afterwards").num_output_tokens >= 1
