"""Requests outside the contract: the error names input, value and bound, and other requests are not affected.

Every bound of every input is tested in tests/engine/test_request_parser.py and test_request_fields.py; here is one of
each kind of error, over every endpoint that can carry it. Drawn values are in tests/engine/test_request_fuzzing.py.
Triton's control endpoints need a key that only the supervisor has.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import tritonclient.grpc
from end_to_end.metrics import Metrics, all_slots_taken
from end_to_end.servers import HTTP, get_json
from end_to_end.streams import STREAM_WIRES, Call
from end_to_end.wires import BAD, TENSOR_WIRES, WIRES, Refusal, Wire, ask, assert_clean, at_once, post
from triton_local.server import LocalTriton
from triton_supervisor.tritonserver_options import CONTROL_HEADER, MAX_BODY_BYTES
from tritonclient.utils import InferenceServerException


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


@pytest.mark.parametrize("server", ["triton", pytest.param("batched_int8", marks=pytest.mark.long)], indirect=True)
def test_bad_requests_among_good_ones_are_refused_and_harm_none(server: LocalTriton) -> None:
    """Good ones over every endpoint, each as it is answered alone."""
    good = [{"text_input": f"Good {index}", "max_tokens": 16, "temperature": 1.0, "seed": index} for index in range(8)]
    alone = [[ask(server, **request)] for request in good]
    bad = [(value, wire) for value in VALUES for wire in value.wires]
    jobs = [
        *(partial(WIRES[index % len(WIRES)], server, request) for index, request in enumerate(good)),
        *(partial(wire, server, {"text_input": "Be bad", value.name: value.value}) for value, wire in bad),
    ]
    results = at_once(jobs)
    assert results[: len(good)] == alone
    for (value, _), refusal in zip(bad, results[len(good) :], strict=True):
        value.check(refusal)


@pytest.mark.parametrize("narrow", ["narrow_default"], indirect=True)
def test_bad_requests_of_a_batch_harm_no_good_one_of_it(narrow: LocalTriton, metrics: Metrics) -> None:
    """While one request waits in the model, three queue up, and Triton puts them into one batch."""
    good = {"text_input": "Good", "max_tokens": 4, "temperature": 0.0}
    bad = good | {"text_input": ""}
    alone = ask(narrow, **good)
    with ExitStack() as calls:
        with all_slots_taken(narrow, metrics, slots=2):
            waiting = [calls.enter_context(Call(narrow, good))]
            metrics.wait(lambda now: now.now("llama_waiting_requests") == 1, "the first one waits in the model")
            waiting += [calls.enter_context(Call(narrow, request)) for request in (bad, good, bad)]
            metrics.wait_for_slots(2, waiting=4)
        first, *batch = [call.outcome() for call in waiting]
    assert [first, batch[1]] == [alone, alone]
    assert all("empty" in str(refusal) for refusal in (batch[0], batch[2]))
    (statistics,) = get_json(narrow, "/v2/models/llama/stats")["model_stats"]
    assert 3 in [int(batch["batch_size"]) for batch in statistics["batch_stats"]]


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


GRPC_HEADER = f"triton-grpc-protocol-{CONTROL_HEADER}"
"""Triton adds the prefix."""

# Of each category, with a body that would do harm if it were read.
CONTROL = {
    "POST /v2/repository/index": b"",
    "POST /v2/repository/models/llama/load": b'{"parameters": {"config": "{}", "file:1/model.py": "aW1wb3J0IG9z"}}',
    "POST /v2/systemsharedmemory/region/x/register": b'{"key": "/x", "offset": 0, "byte_size": 8}',
    "POST /v2/models/llama/trace/setting": b'{"trace_level": ["TENSORS"], "trace_rate": "1"}',
    "POST /v2/logging": b'{"log_info": false, "log_verbose_level": 9}',
}

CALLS: dict[str, Callable[..., object]] = {
    "unload": lambda client, **key: client.unload_model("llama", **key),
    "register": lambda client, **key: client.register_system_shared_memory("x", "/x", 8, **key),
    "set trace": lambda client, **key: client.update_trace_settings(settings={"trace_rate": "1"}, **key),
    "set logging": lambda client, **key: client.update_log_settings({"log_info": False}, **key),
}


@pytest.fixture(scope="module")
def key(triton: LocalTriton) -> str:
    """The server's key, from the one place where it is visible."""
    command = Path(f"/proc/{triton.pid}/cmdline").read_text().split("\0")
    over_http, over_grpc = (word for word in command if word.startswith(("--http-restricted-", "--grpc-restricted-")))
    _, _, key = over_http.rpartition("=")
    assert over_grpc.endswith(f":{CONTROL_HEADER}={key}")
    return key


def _http(server: LocalTriton, what: str, **headers: str) -> httpx.Response:
    method, path = what.split()
    return HTTP.request(method, f"http://{server.http_address}{path}", content=CONTROL[what] or None, headers=headers)


@pytest.mark.parametrize("what", CONTROL)
def test_control_endpoints_over_http_need_the_key(triton: LocalTriton, key: str, what: str) -> None:
    for headers in ({}, {CONTROL_HEADER: key[:-1]}, {GRPC_HEADER: key}):
        refused = _http(triton, what, **headers)
        assert refused.status_code == 403, refused.text
        assert refused.json() == {"error": f"This API is restricted, expecting header '{CONTROL_HEADER}'"}


@pytest.mark.parametrize("what", CALLS)
def test_control_calls_over_grpc_need_the_key(triton: LocalTriton, key: str, what: str) -> None:
    with tritonclient.grpc.InferenceServerClient(triton.grpc_address) as client:
        for headers in ({}, {GRPC_HEADER: key[:-1]}, {CONTROL_HEADER: key}):
            with pytest.raises(InferenceServerException) as refused:
                CALLS[what](client, headers=headers)
            assert refused.value.status() == "StatusCode.UNAVAILABLE"
            assert refused.value.message() == f"This protocol is restricted, expecting header '{GRPC_HEADER}'"


def test_the_key_opens_control_endpoints(triton: LocalTriton, key: str) -> None:
    """After all the refusals above: the model is loaded and unchanged."""
    models = _http(triton, "POST /v2/repository/index", **{CONTROL_HEADER: key}).raise_for_status().json()
    assert [model["name"] for model in models if model.get("state") == "READY"] == ["llama"]
    with tritonclient.grpc.InferenceServerClient(triton.grpc_address) as client:
        models = client.get_model_repository_index(headers={GRPC_HEADER: key}).models
        assert [model.name for model in models if model.state == "READY"] == ["llama"]
    assert ask(triton, text_input="Return a list of", max_tokens=2, min_tokens=2).num_output_tokens == 2
    assert triton.log_text().count("llama: loaded ") == 1
    assert key not in triton.log_text()
