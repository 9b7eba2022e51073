"""Requests outside the contract: the error names input, value and bound, and other requests are not affected.

Every bound of every input is tested in tests/engine/test_request_parser.py and test_request_fields.py; here is one of
each kind of error, over every endpoint that can carry it. Drawn values are in tests/engine/test_request_fuzzing.py.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import pytest
from end_to_end.batches import FULL_SET, in_one_batch
from end_to_end.streams import STREAM_WIRES
from end_to_end.wires import BAD, TENSOR_WIRES, WIRES, Refusal, Wire, ask, assert_clean, post
from triton_local.server import LocalTriton
from triton_supervisor.tritonserver_options import MAX_BODY_BYTES

PROMPT = "Be bad"


class Bad(NamedTuple):
    """An input that is refused, and what the message contains besides its name."""

    name: str
    value: object
    contains: tuple[str, ...]
    wires: tuple[Wire, ...] = WIRES

    def check(self, refusal: object) -> None:
        assert isinstance(refusal, Refusal), f"{self.name} = {str(self.value)[:80]} was answered: {refusal}"
        assert refusal.kind == BAD, refusal
        for part in (self.name, *self.contains):
            assert part in refusal.message, refusal
        assert_clean(refusal.message)


# JSON can't carry every value; /generate has one row of one value a key.
VALUES = [
    Bad("text_input", "", ("empty", "at least one token")),
    Bad("text_input", "word " * 200_000, ("1000000 bytes", "at most 2047 tokens")),
    Bad("text_input", b"caf\xe9", ("UTF-8", "0xe9", "offset 3"), TENSOR_WIRES),
    Bad("temperature", 2.5, ("is 2.5", "at least 0", "at most 2")),
    Bad("presence_penalty", float("nan"), ("is nan", "finite"), TENSOR_WIRES),
    Bad("stop_words", ["x"] * 17, ("17 words", "at most 16")),
]


@pytest.mark.parametrize(
    ("server", "batch_size"),
    [
        ("triton", 16),
        pytest.param("batched_int8", 8, marks=pytest.mark.long),
        pytest.param("batched_fp16", 8, marks=pytest.mark.long),
    ],
    indirect=["server"],
)
def test_bad_requests_of_a_batch_harm_no_good_one(server: LocalTriton, batch_size: int) -> None:
    """Good ones over every endpoint, each as it is answered alone; at least one batch has that size."""
    good = [{**FULL_SET, "text_input": f"Good {index}", "temperature": 1.0, "seed": index} for index in range(8)]
    alone = [[ask(server, **request)] for request in good]
    bad = [(value, wire) for value in VALUES for wire in value.wires]
    jobs = [
        *(partial(WIRES[index % len(WIRES)], server, request) for index, request in enumerate(good)),
        *(
            partial(wire, server, {**FULL_SET, "text_input": PROMPT, "max_tokens": 4, value.name: value.value})
            for value, wire in bad
        ),
    ]
    results, batches = in_one_batch(server, jobs)
    assert results[: len(good)] == alone
    for (value, _), refusal in zip(bad, results[len(good) :], strict=True):
        value.check(refusal)
    assert max(batches) >= batch_size, "the requests were to share batches"


def test_streaming_is_refused_under_a_config_with_one_response(triton: LocalTriton) -> None:
    refusal = Bad("stream", True, ("stream is true; it must be false",))
    for wire in WIRES:
        refusal.check(wire(triton, {"text_input": "x", "stream": True}))
    for stream_wire in STREAM_WIRES:
        assert refusal.contains[0] in str(stream_wire(triton, {"text_input": "x"}).error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"text_input": "x", "temprature": 0.5}', "temprature"),
        (b'{"text_input": "x", "\xcc": 1}', "parameters that are not UTF-8"),
    ],
)
def test_an_unknown_key_of_generate_is_refused_by_name(triton: LocalTriton, body: bytes, message: str) -> None:
    refused = post(triton, "generate", body)
    assert refused.status_code == 400
    assert message in refused.json()["error"]


def test_json_of_two_megabytes_of_nested_lists_is_refused(triton: LocalTriton) -> None:
    """Triton 2.51 reads each level with more of a thread's stack; with 64 MiB this is signal 11."""
    half = MAX_BODY_BYTES // 2 - 10
    refused = post(triton, "generate", b'{"text_input": %s%s}' % (b"[" * half, b"]" * half))
    assert refused.status_code in (400, 500)
    assert refused.json()["error"]
