"""What the metrics show after a known sequence of events, and what a registry that fails costs."""

import threading
import time
from collections.abc import Iterator

import pytest
from engine.metrics import RecordingRegistry, finished_sequence
from engine.scheduling import SECONDS
from llama_engine.engine.events import FAILURE, Completion
from llama_engine.engine.page_manager import CacheCounts
from llama_engine.engine.step_result import StepResult
from llama_engine.errors import InvalidRequest
from llama_engine.kernels.activation_terms import TermCount
from llama_engine.observability.metrics import Metric
from llama_engine.observability.stats import Stats

STOPPED = Completion("", "stop", 3, 4)
IDLE = {
    "llama_slots": 8,
    "llama_slots_in_use": 0,
    "llama_waiting_requests": 0,
    "llama_queue_limit_requests": 64,
    "llama_model_info": 1,
}
LAST_STEP = "llama_last_step_timestamp_seconds"
BAD, PREFILL = StepResult([finished_sequence(FAILURE)], errors=1), StepResult(prefill_tokens=16)
INVALID = StepResult([finished_sequence(InvalidRequest("no token is allowed"))], decoded=1)


@pytest.fixture
def registry() -> RecordingRegistry:
    return RecordingRegistry()


@pytest.fixture
def stats(registry: RecordingRegistry) -> Iterator[Stats]:
    stats = Stats(registry, slots=8, queue_limit=64)
    assert registry.levels == IDLE, "the gauges have no values before the model is ready"
    yield stats
    stats.close(SECONDS)
    assert registry.closed


def test_steps_are_counted_with_what_they_did(stats: Stats, registry: RecordingRegistry) -> None:
    before = time.time()
    stats.record_step(StepResult(decoded=0, sampled=1, prefill_tokens=30), now=100.0, running=1, waiting=2)
    stats.record_step(StepResult(decoded=1, sampled=2, prefill_tokens=16), now=101.0, running=2, waiting=1)
    stats.record_step(StepResult(decoded=2, sampled=1, errors=3), now=101.5, running=2, waiting=0)
    stats.record_step(StepResult(decoded=0, prefill_tokens=16), now=107.5, running=1, waiting=0)
    stats.record_error()
    stats.close(SECONDS)
    assert registry.counts == {"llama_steps_total": 4, "llama_step_errors_total": 4, "llama_generated_tokens_total": 4}
    assert registry.observations == {
        "llama_step_sequences": [1, 2, 1],
        "llama_step_prefill_tokens": [30, 16, 16],
        "llama_inter_token_latency_seconds": [1.0, 0.5],
    }
    assert before <= registry.levels.pop(LAST_STEP) <= time.time()
    assert registry.levels == IDLE | {"llama_slots_in_use": 1}


def test_what_steps_did_in_linear_layers_and_pages_is_counted(stats: Stats, registry: RecordingRegistry) -> None:
    first, second = TermCount(10, 16, 40, 5), TermCount(10, 0, 40, 5)
    for counts, cache in (
        ({"down": first}, CacheCounts(6, 1, 1, 30, 16, 0)),
        ({"down": second, "head": TermCount(2, 4, 8, 3)}, CacheCounts(2, 5, 1, 8, 0, 3)),
        ({}, None),
    ):
        step = StepResult(term_counts=counts, cache=cache, preempted=1, dropped_kv_events=2)
        stats.record_step(step, now=100.0, running=1, waiting=0)
    # Pages are freed between two steps.
    stats.record_load(0, 0, CacheCounts(1, 5, 2, 0, 0, 0))
    stats.close(SECONDS)
    assert {name: level for name, level in registry.levels.items() if "kv_cache" in name} == {
        "llama_kv_cache_pages used": 1,
        "llama_kv_cache_pages cached": 5,
        "llama_kv_cache_pages free": 2,
        "llama_kv_cache_usage_ratio": 0.125,
    }
    assert registry.counts == {
        "llama_steps_total": 3,
        "llama_int8_columns_total down": 800,
        "llama_int8_columns_total head": 16,
        "llama_int8_outlier_columns_total down": 16,
        "llama_int8_outlier_columns_total head": 4,
        "llama_int8_products_total down": 4080,
        "llama_int8_products_total head": 60,
        "llama_prefix_cache_queries_total": 38,
        "llama_prefix_cache_hits_total": 16,
        "llama_kv_cache_evictions_total": 3,
        "llama_preemptions_total": 3,
        "llama_kv_events_dropped_total": 6,
    }


@pytest.mark.parametrize(
    ("steps", "alive"),
    [
        ([BAD, PREFILL], False),
        ([BAD, INVALID], False),
        ([BAD, StepResult(sampled=1), PREFILL], True),
        ([INVALID], True),
    ],
)
def test_after_a_failure_only_a_step_that_yields_a_token_is_a_sign_of_life(
    steps: list[StepResult], alive: bool, stats: Stats, registry: RecordingRegistry
) -> None:
    for step in steps:
        before = time.time()
        stats.record_step(step, now=100.0, running=0, waiting=0)
    stats.close(SECONDS)
    assert registry.counts["llama_steps_total"] == len(steps)
    assert (registry.levels.get(LAST_STEP, 0.0) >= before) is alive
    assert (LAST_STEP in registry.levels) is alive


def test_a_failed_update_costs_no_other_update(
    registry: RecordingRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused, update = threading.Event(), registry.observe

    def refuse_once(metric: Metric, amount: float) -> None:
        if refused.is_set():
            update(metric, amount)
        else:
            refused.set()
            raise RuntimeError("Triton's metrics are off")

    monkeypatch.setattr(registry, "observe", refuse_once)
    stats = Stats(registry, slots=8, queue_limit=64)
    stats.record_finished(finished_sequence(STOPPED))
    assert refused.wait(SECONDS)
    stats.record_finished(finished_sequence(STOPPED))
    stats.close(SECONDS)
    assert registry.levels == IDLE
    assert sum(map(len, registry.observations.values())) == 6 - 1
    assert registry.counts["llama_requests_total stop"] == 2
    assert "an update of the metrics failed" in caplog.text
