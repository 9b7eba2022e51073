"""`make capacity`: the queue's arithmetic, and what the committed result says of its predictions."""

from __future__ import annotations

import pytest

from perf.capacity.queue import (
    CHECKED,
    PREFILL_TOKENS,
    Arrival,
    Kind,
    Replica,
    figures,
    highest_rate,
    poisson,
    simulate,
)
from perf.load.workload import SLOTS

REPLICA = Replica(0.001, {1: 0.01, SLOTS: 0.041})


def test_a_request_alone_takes_its_prefill_and_its_steps() -> None:
    (record,) = simulate(REPLICA, [Arrival(5.0, 100, 3)])
    assert record.token_times == pytest.approx([5.1, 5.11, 5.12])


def test_a_long_prompt_delays_a_running_sequence_by_a_chunk_at_a_time() -> None:
    running, _ = simulate(REPLICA, [Arrival(0.0, 1, 9), Arrival(0.0, 3 * PREFILL_TOKENS, 2)])
    gaps = [after - before for before, after in zip(running.token_times, running.token_times[1:], strict=False)]
    assert max(gaps) == pytest.approx(0.001 * PREFILL_TOKENS + 0.01)


def test_a_request_without_a_slot_waits_until_one_is_free() -> None:
    *first, last = simulate(REPLICA, [Arrival(0.0, 1, 9) for _ in range(SLOTS + 1)])
    assert last.token_times[0] > first[0].token_times[-1]


def test_a_measured_replica_has_the_rate_of_its_closed_loop() -> None:
    replica = Replica.measured(0.1, 100, 50, {1: 1.5, SLOTS: 6.0})
    assert replica.saturated(100, 50) == pytest.approx(6.0)
    (record,) = simulate(replica, [Arrival(0.0, 100, 51)])
    assert record.ended == pytest.approx(1 / 1.5)


def test_at_the_highest_rate_the_bounds_hold() -> None:
    kind = Kind(100, 50, 60.0, 0.4, 0.03)
    rate = highest_rate(REPLICA, kind)
    found = figures(simulate(REPLICA, poisson(rate, kind.prompt, [kind.output] * 500, seed=3)))
    assert 0 < rate <= CHECKED * REPLICA.saturated(kind.prompt, kind.output)
    assert found["time_to_first_token_ms"]["p95"] < 1.2 * 400
    assert found["inter_token_latency_ms"]["p95"] < 1.2 * 30
