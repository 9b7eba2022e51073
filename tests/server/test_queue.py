"""While all slots are taken, the queue is Triton's: its bound, its timeouts, its metric."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
from server.clients import WIRES, Answer, Refusal, ask, generate
from server.metrics import PENDING, Metrics
from server.servers import is_decoupled
from server.streams import STREAM_WIRES, Call, Sse
from triton_local.server import LocalTriton

LONG = {"text_input": "a", "max_tokens": 500, "min_tokens": 500, "temperature": 0.0}
SHORT = {"text_input": "Return a list of the", "max_tokens": 3, "min_tokens": 3, "temperature": 0.0}
LONG_PROMPT = 2
"""Tokens of its prompt: the beginning of every text, and a letter."""


@pytest.fixture(scope="module")
def short(narrow: LocalTriton) -> Answer:
    return ask(narrow, generate, **SHORT)


@contextmanager
def _all_slots_taken(server: LocalTriton, metrics: Metrics) -> Iterator[list[Call]]:
    """Run two requests that last, and check that they lasted as long as the block did; then take them back."""
    with ExitStack() as calls:
        long = [calls.enter_context(Call(server, LONG)) for _ in range(2)]
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 2, "both slots are taken")
        yield long
        for call in long:
            call.cancel()


def test_a_request_is_let_into_a_full_queue_or_waits_before_it(narrow: LocalTriton, short: Answer) -> None:
    metrics = Metrics(narrow)
    with ThreadPoolExecutor() as pool, _all_slots_taken(narrow, metrics) as long:
        handed_over = pool.submit(ask, narrow, generate, **SHORT)
        metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
        assert metrics.now(PENDING) == 0
        queued = [pool.submit(ask, narrow, generate, **SHORT) for _ in range(3)]
        metrics.wait(lambda now: now.now(PENDING) == 3, "three wait in Triton's queue")
        for wire in [generate] if is_decoupled(narrow) else WIRES:
            refusal = wire(narrow, SHORT)
            assert isinstance(refusal, Refusal)
            assert refusal.kind in ("503", "StatusCode.UNAVAILABLE")
            assert "Exceeds maximum queue size" in refusal.message
        if is_decoupled(narrow):
            for stream_wire in STREAM_WIRES:
                assert "Exceeds maximum queue size" in str(stream_wire(narrow, SHORT).error)
            with Sse(narrow, SHORT) as refused:
                assert refused.status == 503
        waiting = (metrics.now("llama_slots_in_use"), metrics.now("llama_waiting_rows"), metrics.now(PENDING))
        assert waiting == (2, 1, 3)
        assert not any(future.done() for future in (handed_over, *queued))
        long[0].cancel()
        # Through the one slot that is free now, while the other one is still taken.
        assert [future.result() for future in (handed_over, *queued)] == [short] * 4
        assert not long[1].done()
    metrics.wait(Metrics.idle, "all have been answered")
    metrics.wait_for(4, "llama_requests_total", finish_reason="length")
    assert metrics.now(PENDING) == 0
    metrics.wait_for(2, "llama_cancellations_total")
    for reason in ("unavailable", "error", "invalid"):
        assert metrics.grown("llama_requests_total", finish_reason=reason) == 0


def test_a_request_out_of_time_is_computed_or_never_told(narrow: LocalTriton, short: Answer) -> None:
    metrics = Metrics(narrow)
    with ThreadPoolExecutor() as pool:
        with _all_slots_taken(narrow, metrics) as long:
            with Call(narrow, SHORT, timeout_us=100_000) as late:
                # The first one is handed over to the model, which tells it itself.
                error = late.outcome()
            assert "the request's time was up before it got a slot" in str(error)
            handed_over = pool.submit(ask, narrow, generate, **SHORT)
            metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
            with Call(narrow, SHORT, timeout_us=100_000) as late:
                error = late.outcome()
            assert "Request timeout expired" in str(error)
            assert not handed_over.done()
            assert not any(call.done() for call in long)
        assert handed_over.result() == short
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    metrics.wait_for(1, "llama_requests_total", finish_reason="unavailable")
    metrics.wait_for(2 * LONG_PROMPT + short.num_input_tokens, "llama_prompt_tokens_total")


def test_time_that_is_long_enough_ends_a_request_that_waits(narrow: LocalTriton, short: Answer) -> None:
    metrics = Metrics(narrow)
    with ExitStack() as calls:
        with _all_slots_taken(narrow, metrics) as long:
            patient = [calls.enter_context(Call(narrow, SHORT, timeout_us=60_000_000)) for _ in range(2)]
            metrics.wait(lambda now: now.now("llama_waiting_rows") + now.now(PENDING) == 2, "both wait")
            assert not any(call.done() for call in (*patient, *long))
        assert [call.outcome() for call in patient] == [short] * 2
