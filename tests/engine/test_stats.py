"""What the metrics show after a known sequence of events, and what a registry that fails costs."""

import math
import re
import threading
import time
from collections.abc import Iterator

import pytest
from engine.registries import RecordingRegistry
from engine.scheduling import SECONDS
from engine.sequences import finished_sequence
from llama_engine.engine import StepResult
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable
from llama_engine.observability import metrics
from llama_engine.observability.metrics import METRICS, Metric
from llama_engine.observability.stats import Stats
from llama_engine.sequence import Completion

STOPPED = Completion("", "stop", 3, 4)
IDLE = {"llama_slots": 8, "llama_slots_in_use": 0, "llama_waiting_rows": 0, "llama_queue_limit_requests": 0}
LAST_STEP = "llama_last_step_timestamp_seconds"


@pytest.fixture
def registry() -> RecordingRegistry:
    return RecordingRegistry()


@pytest.fixture
def stats(registry: RecordingRegistry) -> Iterator[Stats]:
    stats = Stats(registry, slots=8)
    yield stats
    stats.close(SECONDS)


def test_the_gauges_have_their_values_when_the_stats_exist(registry: RecordingRegistry) -> None:
    stats = Stats(registry, slots=8)
    levels = dict(registry.levels)
    stats.close(SECONDS)
    assert levels == IDLE


def test_steps_are_counted_with_their_tokens_and_latencies(stats: Stats, registry: RecordingRegistry) -> None:
    before = time.time()
    stats.record_step(StepResult(decoded=0, sampled=1, prefill_tokens=30), now=100.0, running=1, waiting=2)
    stats.record_step(StepResult(decoded=1, sampled=2, prefill_tokens=16), now=101.0, running=2, waiting=1)
    stats.record_step(StepResult(decoded=2, sampled=1, errors=3), now=101.5, running=2, waiting=0)
    stats.record_step(StepResult(decoded=0, prefill_tokens=16), now=107.5, running=1, waiting=0)
    stats.record_error()
    stats.close(SECONDS)
    assert registry.counts == {"llama_steps_total": 4, "llama_step_errors_total": 4, "llama_generated_tokens_total": 4}
    assert registry.observations == {
        "llama_step_rows": [1, 2, 1],
        "llama_step_prefill_tokens": [30, 16, 16],
        "llama_inter_token_latency_seconds": [1.0, 0.5],
    }
    assert before <= registry.levels.pop(LAST_STEP) <= time.time()
    assert registry.levels == IDLE | {"llama_slots_in_use": 1}


def test_completed_sequences_are_counted_by_finish_reason_with_their_times(
    stats: Stats, registry: RecordingRegistry
) -> None:
    stats.record_finished(finished_sequence(STOPPED))
    stats.record_finished(finished_sequence(Completion("", "length", 3, 4), first_token_at=14.0))
    stats.close(SECONDS)
    assert registry.counts == {
        "llama_requests_total stop": 1,
        "llama_requests_total length": 1,
        "llama_prompt_tokens_total": 6,
    }
    assert registry.observations == {
        "llama_queue_time_seconds": [2.0, 2.0],
        "llama_time_to_first_token_seconds": [5.0, 4.0],
        "llama_request_latency_seconds": [10.0, 10.0],
    }


@pytest.mark.parametrize(
    ("error", "reason"),
    [(Cancelled("c"), "cancelled"), (Unavailable("u"), "unavailable"), (GenerationError("f"), "error")],
)
def test_failed_sequences_are_counted_by_their_error_without_a_latency(
    stats: Stats, registry: RecordingRegistry, error: RequestError, reason: str
) -> None:
    """One that ran, and one that never had a slot."""
    stats.record_finished(finished_sequence(error))
    stats.record_finished(finished_sequence(error, admitted_at=math.nan, first_token_at=math.nan))
    stats.close(SECONDS)
    cancelled = {"llama_cancellations_total": 2} if reason == "cancelled" else {}
    assert registry.counts == {f"llama_requests_total {reason}": 2, "llama_prompt_tokens_total": 3} | cancelled
    assert registry.observations == {
        "llama_queue_time_seconds": [2.0],
        "llama_time_to_first_token_seconds": [5.0],
    }


def test_refused_requests_and_the_load_are_counted(stats: Stats, registry: RecordingRegistry) -> None:
    stats.record_refused(InvalidRequest("top_p is 2; it must be at most 1"))
    stats.record_refused(GenerationError("the request could not be read"))
    stats.record_load(0, 5)
    stats.close(SECONDS)
    assert registry.counts == {"llama_requests_total invalid": 1, "llama_requests_total error": 1}
    assert registry.levels == IDLE | {"llama_waiting_rows": 5}


@pytest.mark.parametrize("queue_limit", [0, 64])
def test_an_idle_server_shows_its_slots_and_its_queue_limit(registry: RecordingRegistry, queue_limit: int) -> None:
    Stats(registry, slots=8, queue_limit=queue_limit).close(SECONDS)
    assert registry.levels == IDLE | {"llama_queue_limit_requests": queue_limit}


def test_the_registry_is_closed_after_the_last_record(stats: Stats, registry: RecordingRegistry) -> None:
    stats.record_error()
    stats.close(SECONDS)
    assert registry.closed
    assert registry.counts["llama_step_errors_total"] == 1


def test_a_step_that_only_fails_is_no_sign_of_life(stats: Stats, registry: RecordingRegistry) -> None:
    stats.record_step(StepResult([finished_sequence(STOPPED)], errors=1), now=100.0, running=0, waiting=0)
    stats.close(SECONDS)
    assert registry.counts["llama_steps_total"] == 1
    assert LAST_STEP not in registry.levels


def test_a_prefill_after_a_step_that_sampled_is_a_sign_of_life(stats: Stats, registry: RecordingRegistry) -> None:
    bad = StepResult([finished_sequence(STOPPED)], errors=1)
    for step in (bad, StepResult(sampled=1), StepResult(prefill_tokens=16)):
        before = time.time()
        stats.record_step(step, now=100.0, running=0, waiting=0)
    stats.close(SECONDS)
    assert registry.levels[LAST_STEP] >= before


@pytest.mark.parametrize("method", ["add", "set", "observe"])
def test_a_failed_update_is_retried_and_only_an_observation_is_lost(
    registry: RecordingRegistry, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused, update = threading.Event(), getattr(registry, method)

    def refuse_once(*arguments: object) -> None:
        if refused.is_set():
            update(*arguments)
        else:
            refused.set()
            raise RuntimeError("Triton's metrics are off")

    monkeypatch.setattr(registry, method, refuse_once)
    stats = Stats(registry, slots=8)
    stats.record_finished(finished_sequence(STOPPED))
    assert refused.wait(SECONDS)
    stats.record_finished(finished_sequence(STOPPED))
    stats.close(SECONDS)
    assert registry.counts == {"llama_requests_total stop": 2, "llama_prompt_tokens_total": 6}
    assert registry.levels == IDLE
    assert sum(map(len, registry.observations.values())) == (5 if method == "observe" else 6)
    assert "1 updates of the metrics failed" in caplog.text


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_a_metric_follows_the_conventions_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"llama(_[a-z]+)+", metric.name)
    # Counters end in _total, times are in seconds, and any other name contains its unit.
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    units = {"seconds", "tokens", "rows", "slots", "steps", "requests", "cancellations", "errors"}
    assert units & set(metric.name.split("_"))
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.kind == "histogram")
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert bool(metric.label) == (metric.values != ("",))


def test_every_metric_is_registered_under_a_name_of_its_own() -> None:
    """Triton registers METRICS; a metric that is missing there can't be counted."""
    assert {one for one in vars(metrics).values() if isinstance(one, Metric)} == set(METRICS)
    assert len({metric.name for metric in METRICS}) == len(METRICS)
