"""Requests that wait in Triton's own queue, and clients that cancel, leave or don't read.

Slots that such clients had become free, and other requests are not affected. The narrow server has two slots and a
queue of three.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest
import tritonclient.grpc
from end_to_end.metrics import LASTING, Metrics, all_slots_taken
from end_to_end.servers import is_decoupled
from end_to_end.streams import STREAM_WIRES, Call, GrpcStream, events, sse_response
from end_to_end.wires import MODEL, UNARY, UNARY_WIRES, WIRES, Answer, Refusal, ask, at_once, generate, tensors
from triton_local.server import LocalTriton

SLOTS, QUEUE = 2, 3
REQUEST = {"text_input": "Return a list of the", "max_tokens": 12, "min_tokens": 12, "temperature": 0.0}


@pytest.fixture
def alone(narrow: LocalTriton) -> Answer:
    return ask(narrow, generate, **REQUEST)


def _is_full(refusal: object) -> bool:
    return (
        isinstance(refusal, Refusal)
        and refusal.kind in ("503", "StatusCode.UNAVAILABLE")
        and "Exceeds maximum queue size" in refusal.message
    )


def _queue_up(server: LocalTriton, metrics: Metrics, calls: ExitStack) -> list[Call]:
    """Send requests one after another until one waits in the model and the queue is full."""
    waiting = []
    for _ in range(1 + QUEUE):
        waiting.append(calls.enter_context(Call(server, REQUEST)))
        if len(waiting) == 1:
            metrics.wait(lambda now: now.now("llama_waiting_requests") == 1, "the first one waits in the model")
        metrics.wait_for_slots(SLOTS, waiting=len(waiting))
    return waiting


def test_a_full_queue_refuses(narrow: LocalTriton, alone: Answer, metrics: Metrics) -> None:
    with ExitStack() as calls:
        with all_slots_taken(narrow, metrics, SLOTS):
            waiting = _queue_up(narrow, metrics, calls)
            # A gRPC stream shows no status.
            wires = (generate, *UNARY_WIRES) if is_decoupled(narrow) else WIRES
            assert [refusal for wire in wires if not _is_full(refusal := wire(narrow, REQUEST))] == []
            if is_decoupled(narrow):
                for stream_wire in STREAM_WIRES:
                    assert "Exceeds maximum queue size" in str(stream_wire(narrow, REQUEST).error)
                with sse_response(narrow, REQUEST) as refused:
                    assert refused.status_code == 503
        assert [call.outcome() for call in waiting] == [alone] * len(waiting)


@pytest.mark.parametrize(
    ("narrow", "model"), [("narrow_default", MODEL), ("narrow_streaming", UNARY)], indirect=["narrow"]
)
def test_a_request_whose_timeout_expires_in_the_queue_is_unavailability(
    narrow: LocalTriton, alone: Answer, metrics: Metrics, model: str
) -> None:
    with ExitStack() as calls:
        with all_slots_taken(narrow, metrics, SLOTS) as long:
            # Long enough for the model to take it, also on a busy machine.
            with Call(narrow, REQUEST, timeout_us=1_000_000, model=model) as late:
                # The model has taken it, and refuses it itself.
                refusal = str(late.outcome())
                assert refusal.startswith("[StatusCode.UNAVAILABLE] ")
                assert "UNAVAILABLE: the request's time was up before it got a slot" in refusal
            metrics.wait(lambda now: now.now("llama_waiting_requests") == 0, "the late one waits no more")
            patient = [calls.enter_context(Call(narrow, REQUEST, timeout_us=60_000_000))]
            metrics.wait(lambda now: now.now("llama_waiting_requests") == 1, "one waits in the model")
            with Call(narrow, REQUEST, timeout_us=100_000, model=model) as late:
                assert "Request timeout expired" in str(late.outcome())
            patient.append(calls.enter_context(Call(narrow, REQUEST, timeout_us=60_000_000)))
            metrics.wait_for_slots(SLOTS, waiting=2)
            assert not any(call.done() for call in (*patient, *long))
        assert [call.outcome() for call in patient] == [alone] * 2
    metrics.wait_for(2, "llama_requests_total", finish_reason="length")
    metrics.wait_for(1, "llama_requests_total", finish_reason="unavailable")
    # The prompts of the long ones have two tokens.
    metrics.wait_for(2 * 2 + 2 * alone.num_input_tokens, "llama_prompt_tokens_total")


TOKENS = 200
"""Of the neighbour: it has to run still when both are seen to run."""

NEIGHBOUR = {"text_input": "Return a list", "max_tokens": TOKENS, "min_tokens": TOKENS, "temperature": 1.0, "seed": 8}
FAR_FEWER = 1200
"""Tokens of a request of 1500 that is cancelled near its beginning."""

UNREAD = {"text_input": "a", "max_tokens": 500, "min_tokens": 500, "temperature": 2.0, "stream": True}


def _cancel_call(server: LocalTriton, metrics: Metrics) -> None:
    with Call(server, LASTING) as call:
        metrics.wait_for_slots(2)
        call.cancel()
        metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")


def _close_sse(server: LocalTriton, _: Metrics) -> None:
    with sse_response(server, LASTING) as response:
        next(events(response))


def _cancel_grpc_stream(server: LocalTriton, _: Metrics) -> None:
    with GrpcStream(server) as stream:
        stream.ask({**LASTING, "stream": True})
        stream.next()
        stream.cancel()


@pytest.mark.parametrize(
    ("narrow", "leave"),
    [
        ("narrow_default", _cancel_call),
        ("narrow_streaming", _close_sse),
        ("narrow_streaming", _cancel_grpc_stream),
    ],
    indirect=["narrow"],
)
def test_a_client_that_leaves_frees_its_slot(
    narrow: LocalTriton, metrics: Metrics, leave: Callable[[LocalTriton, Metrics], None]
) -> None:
    alone = ask(narrow, generate, **NEIGHBOUR)
    with Call(narrow, NEIGHBOUR) as neighbour:
        leave(narrow, metrics)
        assert neighbour.outcome() == alone
        # After its answer there is nothing to cancel.
        neighbour.cancel()
    metrics.wait(Metrics.idle, "the slots are free")
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
    metrics.wait_for(2, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") - 2 * TOKENS < FAR_FEWER


@pytest.mark.parametrize("narrow", ["narrow_default"], indirect=True)
def test_a_request_cancelled_while_it_waits_is_never_computed(narrow: LocalTriton, metrics: Metrics) -> None:
    prompt_tokens = ask(narrow, **LASTING | {"max_tokens": 1, "min_tokens": 1}).num_input_tokens
    with all_slots_taken(narrow, metrics, slots=2) as running, Call(narrow, NEIGHBOUR) as waiting:
        metrics.wait(lambda now: now.now("llama_waiting_requests") == 1, "one waits in the model")
        waiting.cancel()
        # Before a slot is free.
        metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
        assert not any(call.done() for call in running)
    metrics.wait(Metrics.idle, "all have ended")
    # The first request's prompt, and those of the two that ran.
    metrics.wait_for(3 * prompt_tokens, "llama_prompt_tokens_total")


def test_streams_that_are_never_read_do_not_block_others(streaming: LocalTriton) -> None:
    neighbours = [NEIGHBOUR | {"seed": seed} for seed in range(4)]
    alone = [ask(streaming, generate, **neighbour) for neighbour in neighbours]
    metrics = Metrics(streaming)
    host, port = streaming.http_address.split(":")
    body = json.dumps(UNREAD).encode()
    head = b"POST /v2/models/llama/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    read_on = threading.Event()
    with ExitStack() as unread:
        client = unread.enter_context(tritonclient.grpc.InferenceServerClient(streaming.grpc_address))
        unread.callback(read_on.set)
        client.start_stream(lambda result, error: read_on.wait())
        for _ in range(2):
            client.async_stream_infer(MODEL, tensors(tritonclient.grpc.InferInput, UNREAD))
            connection = unread.enter_context(socket.socket())
            # The smallest window that the kernel gives.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.connect((host, int(port)))
            connection.sendall(head + body)
        metrics.wait(lambda now: now.grown("llama_prompt_tokens_total") > 0, "they run")
        jobs = [partial(STREAM_WIRES[index % 2], streaming, request) for index, request in enumerate(neighbours)]
        assert [streamed.whole for streamed in at_once(jobs)] == alone
        metrics.wait_for(4 + len(alone), "llama_requests_total", finish_reason="length")
