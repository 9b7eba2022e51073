"""/infer and unary gRPC beside streams from one set of weights: llama_unary passes requests on to a streaming llama."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http
from server.clients import BAD, Answer, Inputs, Refusal, Wire, answers, ask, assert_clean, at_once, generate, tensors
from server.metrics import LASTING, PENDING, Metrics, fields, said
from server.servers import HTTP, TIMEOUT_S, line_of_death, model_process, until
from server.streams import STREAM_WIRES, whole
from triton_local.server import LocalTriton

UNARY = "llama_unary"
FAR_FEWER = 400
"""Tokens of a request of 500 that is cancelled near its beginning."""

REQUEST = {"text_input": "Return a list of the", "max_tokens": 24, "min_tokens": 24, "temperature": 1.0, "seed": 9}
ROWS = {**{name: [[value]] * 3 for name, value in REQUEST.items()}, "seed": [[1], [2], [9]]}


def infer(server: LocalTriton, inputs: Inputs, request_id: str = "") -> list[Answer] | Refusal:
    """Ask /infer."""
    with tritonclient.http.InferenceServerClient(server.http_url, network_timeout=TIMEOUT_S) as client:
        try:
            asked = tensors(tritonclient.http.InferInput, inputs)
            return answers(client.infer(UNARY, asked, request_id=request_id))
        except tritonclient.utils.InferenceServerException as error:
            return Refusal(BAD if error.status() == "400" else str(error.status()), str(error.message()))


def grpc(server: LocalTriton, inputs: Inputs, request_id: str = "") -> list[Answer] | Refusal:
    """Ask over gRPC."""
    with call(server, inputs, request_id=request_id) as asked:
        return asked.outcome()


class Call:
    """A running request of gRPC's ModelInfer."""

    def __init__(
        self,
        client: tritonclient.grpc.InferenceServerClient,
        inputs: Inputs,
        request_id: str = "",
        timeout: int | None = None,
    ) -> None:
        """Send the request. timeout: Triton's, in microseconds."""
        self._came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        asked = tensors(tritonclient.grpc.InferInput, inputs)
        self._call = client.async_infer(
            UNARY, asked, self._take, request_id=request_id, timeout=timeout, client_timeout=TIMEOUT_S
        )

    def _take(self, result: object, error: object) -> None:
        self._came.put((result, error))

    def cancel(self) -> None:
        """Cancel the request."""
        self._call.cancel()

    def outcome(self) -> list[Answer] | Refusal:
        """Wait for the response."""
        result, error = self._came.get(timeout=TIMEOUT_S)
        if error is None:
            return answers(result)
        kind = BAD if error.status() == "StatusCode.INVALID_ARGUMENT" else str(error.status())
        return Refusal(kind, str(error.message()))


@contextmanager
def call(server: LocalTriton, inputs: Inputs, request_id: str = "", timeout: int | None = None) -> Iterator[Call]:
    with tritonclient.grpc.InferenceServerClient(server.grpc_url) as client:
        yield Call(client, inputs, request_id, timeout)


WIRES = pytest.mark.parametrize("wire", [infer, grpc], ids=["/infer", "ModelInfer"])


@WIRES
def test_a_unary_request_gets_what_the_streaming_model_answers(streaming: LocalTriton, wire: Wire) -> None:
    expected = [ask(streaming, generate, **REQUEST | {"seed": seed}) for seed in (1, 2, 9)]
    assert wire(streaming, REQUEST) == expected[2:]
    assert wire(streaming, ROWS) == expected


def test_unary_requests_and_streams_run_together(streaming: LocalTriton) -> None:
    requests = [{**REQUEST, "seed": seed} for seed in range(12)]
    alone = [ask(streaming, generate, **request) for request in requests]
    streams = [partial(whole, streaming, STREAM_WIRES[0], request) for request in requests]
    together: list[object] = at_once([*(partial(infer, streaming, request) for request in requests), *streams])
    assert together == [*([answer] for answer in alone), *alone]


@WIRES
@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": 10_000},
        {"temperature": -1.0},
        {"text_input": ""},
        {"stop_words": ["a"] * 17},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_an_error_keeps_its_code_and_its_message(streaming: LocalTriton, wire: Wire, wrong: Inputs) -> None:
    direct, refused = (way(streaming, {**REQUEST, **wrong}) for way in (generate, wire))
    assert isinstance(direct, Refusal)
    assert refused == direct
    assert refused.kind == BAD
    assert_clean(refused.message)


def test_a_request_for_a_stream_is_refused_by_name(streaming: LocalTriton) -> None:
    refused = infer(streaming, {**REQUEST, "stream": True})
    assert refused == Refusal(BAD, "stream is true; it must be false: llama_unary answers in one response")
    assert infer(streaming, {**REQUEST, "stream": False}) == [ask(streaming, generate, **REQUEST)]


@pytest.mark.parametrize("value", [1, "one", True])
def test_request_parameters_reach_the_model(streaming: LocalTriton, value: object) -> None:
    tensor = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}
    body = {"inputs": [tensor], "parameters": {"temprature": value}}
    refused = HTTP.post(f"http://{streaming.http_url}/v2/models/{UNARY}/infer", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("'temprature' is no input of this model")


@pytest.mark.parametrize("forged", ["{}", '["../../proc/1/root", {}]', f'["{32 * "0"}", 1]', "x", 10_000 * "["])
def test_a_forged_request_is_refused_as_one_with_an_unknown_parameter(streaming: LocalTriton, forged: str) -> None:
    refused = generate(streaming, {"text_input": "a", UNARY: forged})
    assert isinstance(refused, Refusal)
    assert refused.kind == BAD
    assert refused.message.startswith(f"'{UNARY}' is no input of this model")


def test_a_requests_id_is_in_the_log(streaming: LocalTriton) -> None:
    assert isinstance(infer(streaming, REQUEST, request_id="unary-17"), list)
    until(lambda: any(fields(line)["id"] == "unary-17" for line in said(streaming)), lambda: "it is logged")


def test_a_cancelled_request_frees_its_slot(narrow_streaming: LocalTriton) -> None:
    metrics = Metrics(narrow_streaming)
    with call(narrow_streaming, LASTING) as lasting, call(narrow_streaming, REQUEST) as neighbour:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both run")
        lasting.cancel()
        assert neighbour.outcome() == [ask(narrow_streaming, generate, **REQUEST)]
        metrics.wait(Metrics.idle, "the slot is free")
    metrics.wait_for(1, "llama_cancellations_total")
    assert metrics.grown("llama_generated_tokens_total") - 2 * 24 < FAR_FEWER


def test_a_request_cancelled_while_it_waits_is_never_computed(narrow_streaming: LocalTriton) -> None:
    metrics = Metrics(narrow_streaming)
    with ExitStack() as calls:
        lasting = [calls.enter_context(call(narrow_streaming, LASTING)) for _ in range(2)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both run")
        waiting = calls.enter_context(call(narrow_streaming, REQUEST))
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
        waiting.cancel()
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 0, "none waits")
        assert metrics.now("llama_slots_in_use") == 2
        for running in lasting:
            running.cancel()
        metrics.wait(Metrics.idle, "all have ended")
    metrics.wait_for(3, "llama_cancellations_total")


def test_a_timeout_before_it_has_a_slot_is_unavailability(narrow_streaming: LocalTriton) -> None:
    metrics = Metrics(narrow_streaming)
    with ExitStack() as calls:
        lasting = [calls.enter_context(call(narrow_streaming, LASTING)) for _ in range(2)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both run")
        refused = calls.enter_context(call(narrow_streaming, REQUEST, timeout=200_000)).outcome()
        assert isinstance(refused, Refusal)
        assert refused.kind == "StatusCode.UNAVAILABLE"
        for running in lasting:
            running.cancel()
        metrics.wait(Metrics.idle, "all have ended")


def test_a_full_queue_is_unavailability(narrow_streaming: LocalTriton) -> None:
    metrics = Metrics(narrow_streaming)
    with ExitStack() as calls:
        lasting = [calls.enter_context(call(narrow_streaming, LASTING)) for _ in range(2)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both run")
        waiting = [calls.enter_context(call(narrow_streaming, REQUEST))]
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model, and blocks the queue")
        waiting += [calls.enter_context(call(narrow_streaming, REQUEST)) for _ in range(3)]
        metrics.wait(lambda now: now.now(PENDING) == 3, "the queue is full")
        refused = infer(narrow_streaming, REQUEST)
        assert isinstance(refused, Refusal)
        assert refused.kind == "503"
        assert "Exceeds maximum queue size" in refused.message
        for running in lasting:
            running.cancel()
        assert [one.outcome() for one in waiting] == [[ask(narrow_streaming, generate, **REQUEST)]] * 4


@pytest.mark.long
def test_a_drained_server_answers_unary_requests_and_unloads_llama_last(ended_unary: LocalTriton) -> None:
    metrics = Metrics(ended_unary)
    with ExitStack() as calls:
        lasting = [{**LASTING, "text_input": str(number)} for number in range(4)]
        running = [calls.enter_context(call(ended_unary, inputs)) for inputs in lasting]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "two run, two wait")
        ended_unary.terminate()
        for one in running:
            outcome = one.outcome()
            assert isinstance(outcome, list), outcome
            assert outcome[0].num_output_tokens == LASTING["max_tokens"]
    assert ended_unary.wait() == 0
    log = ended_unary.log_text()
    assert 0 < log.index("unloaded 'llama_unary'") < log.index("unloaded 'llama'")


def test_the_death_of_llama_unarys_process_ends_the_server(killed_unary: LocalTriton) -> None:
    metrics = Metrics(killed_unary)
    process = model_process(killed_unary, UNARY)
    with call(killed_unary, LASTING) as running:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 1, "it runs")
        os.kill(process.pid, signal.SIGKILL)
        assert isinstance(running.outcome(), Refusal)
    assert line_of_death(killed_unary).startswith(f"the model process {process.pid} is gone: ")
