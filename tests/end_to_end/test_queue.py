"""With all slots taken, requests wait in Triton's own queue. The narrow server has two slots and a queue of three."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from end_to_end.metrics import Metrics, all_slots_taken
from end_to_end.servers import is_decoupled
from end_to_end.streams import STREAM_WIRES, Call, sse_response
from end_to_end.wires import MODEL, UNARY, UNARY_WIRES, WIRES, Answer, Refusal, ask, generate
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
