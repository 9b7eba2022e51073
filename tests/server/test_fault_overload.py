"""Ten times as many requests as there is room for: who is refused learns it at once, who is let in is answered in turn.

"At once" is counted, not timed: all refusals come while nobody who was let in has been answered. So is "in turn": by
how many that came later somebody was overtaken. The server has two slots and a queue of three.
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
from server.streams import Call
from triton_local.server import LocalTriton

SLOTS, QUEUE = 2, 3
CROWD = 10 * (SLOTS + QUEUE)

LARGEST_GROUP = QUEUE
"""What the model takes from the queue in one go is what is in there at most."""

REQUEST = {"text_input": "Return a list of the", "max_tokens": 12, "min_tokens": 12, "temperature": 0.0}

INSISTENT = 10
"""Clients that ask again as soon as they are refused."""

MOST_TRIES = 5_000
"""Of each of them, so that the test has an end."""


@pytest.fixture(scope="module")
def alone(narrow: LocalTriton) -> Answer:
    return ask(narrow, generate, **REQUEST)


def _wires(server: LocalTriton) -> list[Wire]:
    """Return the ways to ask that show a refusal's status; a gRPC stream has the message only."""
    return [generate] if is_decoupled(server) else list(WIRES)


def _is_full(refusal: object) -> bool:
    return (
        isinstance(refusal, Refusal)
        and refusal.kind in ("503", "StatusCode.UNAVAILABLE")
        and "Exceeds maximum queue size" in refusal.message
    )


def _ended(metrics: Metrics) -> dict[str, float]:
    reasons = ("stop", "length", "cancelled", "unavailable", "invalid", "error")
    return {reason: metrics.grown("llama_requests_total", finish_reason=reason) for reason in reasons}


def test_who_is_refused_waits_for_others_or_who_is_let_in_is_lost(narrow: LocalTriton, alone: Answer) -> None:
    metrics, wires = Metrics(narrow), _wires(narrow)
    with ThreadPoolExecutor(CROWD) as pool:
        with all_slots_taken(narrow, metrics, SLOTS) as lasting:
            jobs = [partial(wires[index % len(wires)], narrow, REQUEST) for index in range(CROWD)]
            crowd: list[Future[list[Answer] | Refusal]] = [pool.submit(job) for job in jobs]

            def all_have_a_place_or_none(now: Metrics) -> bool:
                refused = sum(one.done() for one in crowd)
                return refused + now.now("llama_waiting_rows") + now.now(PENDING) == CROWD

            metrics.wait(all_have_a_place_or_none, "everybody is refused or waits")
            # A queue full of them, and perhaps a group that the model had taken before.
            let_in = [one for one in crowd if not one.done()]
            assert QUEUE <= len(let_in) <= QUEUE + LARGEST_GROUP
            refusals = [one.result() for one in crowd if one.done()]
            assert len(refusals) == CROWD - len(let_in)
            assert [refusal for refusal in refusals if not _is_full(refusal)] == []
            # Meanwhile nobody has ended: no refusal had to wait for a place to become free.
            assert not any(call.done() for call in lasting)
            assert metrics.now("llama_slots_in_use") == SLOTS
            assert sum(_ended(metrics).values()) == 0
        assert [one.result() for one in let_in] == [[alone]] * len(let_in)
    metrics.wait(Metrics.idle, "all have been answered")
    metrics.wait_for(len(let_in), "llama_requests_total", finish_reason="length")
    metrics.wait_for(SLOTS, "llama_cancellations_total")
    expected = dict.fromkeys(_ended(metrics), 0.0)
    assert _ended(metrics) == expected | {"length": len(let_in), "cancelled": SLOTS}
    assert metrics.now(PENDING) == 0
    # Who has got into the queue is a success to Triton 2.51, whatever the model answered; who hasn't is nothing to it.
    assert metrics.grown("nv_inference_request_success") == len(let_in) + SLOTS
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert metrics.grown("nv_inference_request_failure", reason=reason) == 0


def test_who_was_let_in_is_overtaken_by_a_crowd(narrow: LocalTriton, alone: Answer) -> None:
    metrics = Metrics(narrow)
    order: list[int] = []
    """Who was answered, one after another: the place at which it was let in, or `behind` for one of the crowd."""
    places = 1 + QUEUE
    behind = places
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
                continue
            assert outcome == [alone]
            order.append(behind)

    with ThreadPoolExecutor(INSISTENT + places) as pool, ExitStack() as calls:
        # Also if something below fails: nobody is to insist for ever.
        calls.callback(enough.set)
        with all_slots_taken(narrow, metrics, SLOTS) as lasting:
            # One that the model has taken and three in the queue, each let in before the next one asks.
            let_in = [calls.enter_context(Call(narrow, REQUEST))]
            metrics.wait(lambda now: now.now("llama_waiting_rows") == 1, "the first one waits in the model")
            for count in range(1, places):
                let_in.append(calls.enter_context(Call(narrow, REQUEST)))
                metrics.wait(lambda now, count=count: now.now(PENDING) == count, "the next one waits in Triton")  # type: ignore[misc]  # a lambda's default is not seen
            waiting = [pool.submit(wait, place, call) for place, call in enumerate(let_in)]
            crowd = [pool.submit(insist, client) for client in range(INSISTENT)]
            until(lambda: sum(refused) >= CROWD, lambda: f"{CROWD} are refused, and not only {sum(refused)}")
            assert order == []
            assert not any(call.done() for call in lasting)
        # From here on there is room again, and a crowd before the door.
        for one in waiting:
            one.result()
        enough.set()
        for insistent in crowd:
            insistent.result()
    for place in range(places):
        before = order[: order.index(place)]
        overtaken_by = sum(other > place for other in before)
        assert overtaken_by <= SLOTS + LARGEST_GROUP, f"{place} was overtaken by {overtaken_by}: {order}"
    metrics.wait(Metrics.idle, "all have been answered")
    metrics.wait_for(len(order), "llama_requests_total", finish_reason="length")
    assert _ended(metrics) == dict.fromkeys(_ended(metrics), 0.0) | {"length": len(order), "cancelled": SLOTS}
