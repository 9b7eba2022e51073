"""The arithmetic of `make capacity`, `make tune` and `make soak`: a queue, the choice within an SLO, growth."""

from __future__ import annotations

import os

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc.model_config_pb2 import ModelConfig

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
from perf.environment import ROOT, family
from perf.load.workload import SLOTS
from perf.soak import grown, memory_mib
from perf.tune import Point, best, configured, grid

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


CONFIG = (ROOT / "model_repository" / "llama" / "config.pbtxt").read_text()


@pytest.mark.parametrize("point", grid())
def test_triton_reads_a_points_settings_from_its_config(point: Point) -> None:
    config = text_format.Parse(configured(CONFIG, point), ModelConfig())
    batcher = config.dynamic_batching
    assert config.max_batch_size == point.slots
    assert batcher.max_queue_delay_microseconds == point.delay_us
    assert list(batcher.preferred_batch_size) == list(point.preferred)


def measurement(rate: float, p95: float, errors: int = 0) -> dict[str, object]:
    return {"tokens_per_second": rate, "latency_ms": {"p95": p95}, "errors": errors}


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (measurement(200.0, 90.0), "other"),
        # Faster, but beyond the SLO, or with errors, or not measured.
        (measurement(200.0, 110.0), "small"),
        (measurement(200.0, 90.0, errors=1), "small"),
        ({"not_run": "no time is left"}, "small"),
    ],
)
def test_the_fastest_point_within_the_slo_is_the_best(other: dict[str, object], key: str) -> None:
    assert best({"small": measurement(100.0, 50.0), "other": other}, 100.0) == key


def test_growth_counts_in_the_second_half_alone() -> None:
    assert grown([10.0, 50.0, 90.0, 100.0, 100.0, 100.0, 110.0, 130.0]) == 30.0


def test_the_memory_of_a_process_is_sampled_by_its_name() -> None:
    assert all(mib > 1.0 for mib in memory_mib(family(os.getpid())).values())
