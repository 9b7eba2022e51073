"""A request that is taken back gives up its slot, or never gets one; its neighbours don't notice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import pytest
from server.clients import Answer, ask, generate
from server.metrics import PENDING, Metrics
from server.streams import Call, GrpcStream, Sse
from triton_local.server import LocalTriton

LONG = {"text_input": "a", "max_tokens": 500, "min_tokens": 500, "temperature": 0.0}
NEIGHBOUR = {"text_input": "Return a list of the", "max_tokens": 60, "min_tokens": 60, "temperature": 1.0, "seed": 8}
FAR_FEWER = 400
"""Tokens of a request of 500 that is taken back near its beginning."""


def _running(metrics: Metrics, rows: int) -> bool:
    return metrics.now("llama_slots_in_use") == rows


@pytest.fixture
def metrics(narrow: LocalTriton) -> Metrics:
    return Metrics(narrow)


def test_a_cancelled_request_keeps_its_slot(narrow: LocalTriton, metrics: Metrics) -> None:
    alone = ask(narrow, generate, **NEIGHBOUR)
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    with Call(narrow, LONG) as call, Call(narrow, NEIGHBOUR) as neighbour:
        metrics.wait(lambda now: _running(now, 2), "both run")
        call.cancel()
        assert neighbour.outcome() == alone
        metrics.wait(Metrics.idle, "the slot is given back")
    metrics.wait_for(1, "llama_cancellations_total")
    metrics.wait_for(1, "llama_requests_total", finish_reason="cancelled")
    metrics.wait_for(2, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") - 2 * 60 < FAR_FEWER
    assert metrics.grown("llama_steps_total") - 60 < FAR_FEWER


def test_a_request_cancelled_while_it_waits_is_computed(narrow: LocalTriton, metrics: Metrics) -> None:
    with ExitStack() as calls:
        long = [calls.enter_context(Call(narrow, LONG)) for _ in range(2)]
        metrics.wait(lambda now: _running(now, 2), "both slots are taken")
        # One that the model has been given, and behind it one in Triton's own queue.
        handed_over = calls.enter_context(Call(narrow, NEIGHBOUR))
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
        queued = calls.enter_context(Call(narrow, NEIGHBOUR))
        metrics.wait(lambda now: now.now(PENDING) == 1, "one waits in Triton")
        queued.cancel()
        handed_over.cancel()
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 0, "nobody waits in the model")
        metrics.wait(lambda now: now.now(PENDING) == 0, "nobody waits in Triton")
        assert _running(metrics, 2)
        assert not any(call.done() for call in long)
        for call in long:
            call.cancel()
        metrics.wait(Metrics.idle, "all are given up")
    tokens = ask(narrow, generate, **LONG | {"max_tokens": 1, "min_tokens": 1}).num_input_tokens
    metrics.wait_for(3 * tokens, "llama_prompt_tokens_total")
    # Whether Triton drops the one in its own queue or lets the model do it is Triton's business.
    assert 3 <= metrics.grown("llama_cancellations_total") <= 4
    assert metrics.grown("llama_generated_tokens_total") < 2 * FAR_FEWER


def test_a_slot_that_was_given_back_holds_something_of_the_one_before(narrow: LocalTriton, metrics: Metrics) -> None:
    alone = ask(narrow, generate, **NEIGHBOUR)
    for _ in range(4):
        with Call(narrow, LONG) as call, Call(narrow, NEIGHBOUR) as neighbour:
            metrics.wait(lambda now: _running(now, 2), "both run")
            call.cancel()
            assert neighbour.outcome() == alone
        metrics.wait(Metrics.idle, "nobody runs")
    metrics.wait_for(4, "llama_cancellations_total")


def _close_sse(server: LocalTriton) -> None:
    with Sse(server, LONG) as stream:
        stream.next()


def _reset_sse(server: LocalTriton) -> None:
    stream = Sse(server, LONG)
    stream.next()
    stream.reset()


def _cancel_grpc_stream(server: LocalTriton) -> None:
    with GrpcStream(server) as stream:
        stream.ask({**LONG, "stream": True})
        stream.next()
        stream.cancel()


def _cancel_grpc_stream_of_three(server: LocalTriton) -> None:
    with GrpcStream(server) as stream:
        for number in range(3):
            stream.ask({**LONG, "stream": True}, request_id=str(number))
        # What Triton hasn't read yet is never a request.
        begun: set[str] = set()
        while len(begun) < 3:
            begun.add(stream.next().request_id)
        stream.cancel()


@pytest.mark.parametrize(
    ("leave", "rows"),
    [(_close_sse, 1), (_reset_sse, 1), (_cancel_grpc_stream, 1), (_cancel_grpc_stream_of_three, 3)],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_a_stream_that_is_left_keeps_its_slot(
    streaming: LocalTriton, leave: Callable[[LocalTriton], None], rows: int
) -> None:
    alone = ask(streaming, generate, **NEIGHBOUR)
    metrics = Metrics(streaming)
    with Call(streaming, NEIGHBOUR) as neighbour:
        leave(streaming)
        assert neighbour.outcome() == alone
    metrics.wait(Metrics.idle, "the slot is given back")
    metrics.wait_for(rows, "llama_cancellations_total")
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_generated_tokens_total") - 60 < rows * FAR_FEWER


def test_an_answer_that_is_cancelled_too_late_is_counted_as_cancelled(narrow: LocalTriton, metrics: Metrics) -> None:
    with Call(narrow, NEIGHBOUR) as call:
        assert isinstance(call.outcome(), Answer)
        call.cancel()
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    assert metrics.grown("llama_cancellations_total") == 0
