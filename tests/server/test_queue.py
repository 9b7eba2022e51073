"""Waiting: short requests overtake long ones in the batch; with all slots taken the queue is Triton's own.

Refusals are "at once" if they come while no admitted request has finished; order is counted in requests overtaken.
The narrow server has two slots and a queue of three.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
from server.clients import WIRES, Answer, Refusal, Wire, ask, generate
from server.metrics import PENDING, Metrics, all_slots_taken
from server.servers import is_decoupled, until
from server.streams import STREAM_WIRES, Call, GrpcStream, Sse
from triton_local.server import LocalTriton

SLOTS, QUEUE = 2, 3
CROWD = 10 * (SLOTS + QUEUE)
LARGEST_GROUP = QUEUE
"""Requests that the model takes from the queue in one go, at most."""

INSISTENT = 10
"""Clients that ask again as soon as they are refused."""

MOST_TRIES = 5_000
"""Of each insistent client, so that the test ends."""

LONG = {"text_input": "Return a list of the", "max_tokens": 300, "min_tokens": 300, "temperature": 0.0}
SHORT = {"text_input": "The class", "max_tokens": 5, "min_tokens": 5, "temperature": 1.0, "seed": 6}
REQUEST = {"text_input": "Return a list of the", "max_tokens": 12, "min_tokens": 12, "temperature": 0.0}
REASONS = ("stop", "length", "cancelled", "unavailable", "invalid", "error")


@pytest.fixture(scope="module")
def alone(narrow: LocalTriton) -> Answer:
    return ask(narrow, generate, **REQUEST)


def _wires(server: LocalTriton) -> list[Wire]:
    """Return the endpoints that show a refusal's status; a gRPC stream has the message only."""
    return [generate] if is_decoupled(server) else list(WIRES)


def _is_full(refusal: object) -> bool:
    return (
        isinstance(refusal, Refusal)
        and refusal.kind in ("503", "StatusCode.UNAVAILABLE")
        and "Exceeds maximum queue size" in refusal.message
    )


def _finished(metrics: Metrics) -> dict[str, float]:
    """Return the finish reasons counted since the metrics were made, without those that did not occur."""
    grown = {reason: metrics.grown("llama_requests_total", finish_reason=reason) for reason in REASONS}
    return {reason: count for reason, count in grown.items() if count}


def _queue_up(server: LocalTriton, metrics: Metrics, calls: ExitStack) -> list[Call]:
    """Send requests one after another until one waits in the model and the queue is full."""
    waiting = [calls.enter_context(Call(server, REQUEST))]
    metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "the first one waits in the model")
    for count in range(1, QUEUE + 1):
        waiting.append(calls.enter_context(Call(server, REQUEST)))
        until(lambda count=count: metrics.now(PENDING) == count, lambda: "the next one waits in Triton")  # type: ignore[misc]  # mypy doesn't see a lambda's default
    return waiting


def test_a_short_request_finishes_before_a_long_one_that_runs(either: LocalTriton) -> None:
    alone = ask(either, generate, **SHORT)
    metrics = Metrics(either)
    with Call(either, LONG) as long:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 1, "the long one runs")
        for _ in range(3):
            assert ask(either, generate, **SHORT) == alone
            assert not long.done()
        assert metrics.grown("llama_steps_total") < 300
        answer = long.outcome()
    metrics.wait_for(300 + 3 * 5, "llama_generated_tokens_total")
    # They share all steps, but perhaps the one of a prefill.
    assert metrics.grown("llama_steps_total") <= 300 + 3
    assert answer == ask(either, generate, **LONG)


def test_a_short_stream_finishes_before_a_long_one_and_shares_its_steps(streaming: LocalTriton) -> None:
    metrics = Metrics(streaming)
    with GrpcStream(streaming) as stream:
        stream.ask({**LONG, "stream": True}, request_id="long")
        came = [stream.next()]
        stream.ask({**SHORT, "stream": True}, request_id="short")
        while not came[-1].final or came[-1].request_id != "long":
            came.append(stream.next())
    assert [response.request_id for response in came if response.final] == ["short", "long"]
    first = next(index for index, response in enumerate(came) if response.request_id == "short")
    last = next(index for index, response in enumerate(came) if response.final)
    assert "long" in {response.request_id for response in came[first:last]}
    metrics.wait_for(305, "llama_generated_tokens_total")
    assert metrics.grown("llama_steps_total") <= 301


def test_waiting_requests_are_admitted_in_their_order(narrow: LocalTriton, metrics: Metrics) -> None:
    """All four go through one slot while a long request keeps the other."""
    with ExitStack() as calls, all_slots_taken(narrow, metrics, SLOTS) as long:
        waiting = _queue_up(narrow, metrics, calls)
        long[0].cancel()
        for index, call in enumerate(waiting):
            assert isinstance(call.outcome(), Answer)
            assert not any(behind.done() for behind in waiting[index + 2 :])
        assert not long[1].done()


def test_a_full_queue_refuses_and_answers_what_it_holds(narrow: LocalTriton, metrics: Metrics, alone: Answer) -> None:
    with ExitStack() as calls, all_slots_taken(narrow, metrics, SLOTS) as long:
        waiting = _queue_up(narrow, metrics, calls)
        assert all(_is_full(wire(narrow, REQUEST)) for wire in _wires(narrow))
        if is_decoupled(narrow):
            for stream_wire in STREAM_WIRES:
                assert "Exceeds maximum queue size" in str(stream_wire(narrow, REQUEST).error)
            with Sse(narrow, REQUEST) as refused:
                assert refused.status == 503
        levels = (metrics.now("llama_slots_in_use"), metrics.now("llama_waiting_rows"), metrics.now(PENDING))
        assert levels == (SLOTS, 1, QUEUE)
        assert not any(call.done() for call in waiting)
        long[0].cancel()
        assert [call.outcome() for call in waiting] == [alone] * 4
        assert not long[1].done()
    metrics.wait(Metrics.idle, "all have been answered")
    metrics.wait_for(SLOTS, "llama_cancellations_total")
    assert _finished(metrics) == {"length": 4, "cancelled": SLOTS}
    assert metrics.now(PENDING) == 0


def test_a_request_whose_timeout_expires_in_the_queue_is_refused(
    narrow: LocalTriton, metrics: Metrics, alone: Answer
) -> None:
    with ThreadPoolExecutor() as pool:
        with all_slots_taken(narrow, metrics, SLOTS) as long:
            with Call(narrow, REQUEST, timeout_us=100_000) as late:
                # The model has taken it, and refuses it itself.
                assert "the request's time was up before it got a slot" in str(late.outcome())
            in_model = pool.submit(ask, narrow, generate, **REQUEST)
            metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "one waits in the model")
            with Call(narrow, REQUEST, timeout_us=100_000) as late:
                assert "Request timeout expired" in str(late.outcome())
            assert not any(call.done() for call in long)
        assert in_model.result() == alone
    metrics.wait_for(1, "llama_requests_total", finish_reason="length")
    metrics.wait_for(1, "llama_requests_total", finish_reason="unavailable")
    # The prompts of the long ones have two tokens.
    metrics.wait_for(2 * 2 + alone.num_input_tokens, "llama_prompt_tokens_total")


def test_a_request_is_answered_within_its_timeout(narrow: LocalTriton, metrics: Metrics, alone: Answer) -> None:
    with ExitStack() as calls:
        with all_slots_taken(narrow, metrics, SLOTS) as long:
            patient = [calls.enter_context(Call(narrow, REQUEST, timeout_us=60_000_000)) for _ in range(2)]
            metrics.wait(lambda now: now.now("llama_waiting_rows") + now.now(PENDING) == 2, "both wait")
            assert not any(call.done() for call in (*patient, *long))
        assert [call.outcome() for call in patient] == [alone] * 2


def test_a_crowd_is_refused_at_once_or_answered(narrow: LocalTriton, metrics: Metrics, alone: Answer) -> None:
    wires = _wires(narrow)
    with ThreadPoolExecutor(CROWD) as pool:
        with all_slots_taken(narrow, metrics, SLOTS) as long:
            jobs = [partial(wires[index % len(wires)], narrow, REQUEST) for index in range(CROWD)]
            crowd: list[Future[list[Answer] | Refusal]] = [pool.submit(job) for job in jobs]

            def all_are_refused_or_wait(now: Metrics) -> bool:
                refused = sum(one.done() for one in crowd)
                return refused + now.now("llama_waiting_rows") + now.now(PENDING) == CROWD

            metrics.wait(all_are_refused_or_wait, "every request is refused or waits")
            # A full queue, and perhaps a group that the model had taken before.
            admitted = [one for one in crowd if not one.done()]
            assert QUEUE <= len(admitted) <= QUEUE + LARGEST_GROUP
            assert [one.result() for one in crowd if one.done() and not _is_full(one.result())] == []
            # No refusal had to wait for a request to finish.
            assert not any(call.done() for call in long)
            assert metrics.now("llama_slots_in_use") == SLOTS
            assert _finished(metrics) == {}
        assert [one.result() for one in admitted] == [[alone]] * len(admitted)
    metrics.wait(Metrics.idle, "all have been answered")
    metrics.wait_for(len(admitted), "llama_requests_total", finish_reason="length")
    metrics.wait_for(SLOTS, "llama_cancellations_total")
    assert _finished(metrics) == {"length": len(admitted), "cancelled": SLOTS}
    assert metrics.now(PENDING) == 0
    # To Triton 2.51 a queued request is a success whatever the model answers, and a refused one is not counted.
    assert metrics.grown("nv_inference_request_success") == len(admitted) + SLOTS
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert metrics.grown("nv_inference_request_failure", reason=reason) == 0


def test_a_queued_request_is_overtaken_by_few_of_a_crowd(narrow: LocalTriton, metrics: Metrics, alone: Answer) -> None:
    order: list[int] = []
    """Who was answered: the place of a queued request, or `behind` for one of the crowd."""
    behind = places = 1 + QUEUE
    enough = threading.Event()
    refused = [0] * INSISTENT

    def wait(place: int, call: Call) -> None:
        assert call.outcome() == alone
        order.append(place)

    def insist(client: int) -> None:
        for _ in range(MOST_TRIES):
            if enough.is_set():
                return
            outcome = generate(narrow, REQUEST)
            if _is_full(outcome):
                refused[client] += 1
            else:
                assert outcome == [alone]
                order.append(behind)

    with ThreadPoolExecutor(INSISTENT + places) as pool, ExitStack() as calls:
        # Also after a failure below, or the crowd would insist on.
        calls.callback(enough.set)
        with all_slots_taken(narrow, metrics, SLOTS) as long:
            queued = _queue_up(narrow, metrics, calls)
            waiting = [pool.submit(wait, place, call) for place, call in enumerate(queued)]
            crowd = [pool.submit(insist, client) for client in range(INSISTENT)]
            until(lambda: sum(refused) >= CROWD, lambda: f"{CROWD} are refused, and not only {sum(refused)}")
            assert order == []
            assert not any(call.done() for call in long)
        # From here on there is room, and the crowd asks for it.
        for one in waiting:
            one.result()
        enough.set()
        for insistent in crowd:
            insistent.result()
    for place in range(places):
        overtaken_by = sum(other > place for other in order[: order.index(place)])
        assert overtaken_by <= SLOTS + LARGEST_GROUP, f"{place} was overtaken by {overtaken_by}: {order}"
    metrics.wait(Metrics.idle, "all have been answered")
    metrics.wait_for(len(order), "llama_requests_total", finish_reason="length")
    assert _finished(metrics) == {"length": len(order), "cancelled": SLOTS}
