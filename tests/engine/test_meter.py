"""What the metrics say after a known sequence of events, and what a registry that fails costs."""

import re
import threading
import time
from collections.abc import Iterator
from typing import Literal

import pytest
from engine.registries import RecordingRegistry
from engine.scheduling import SECONDS, Answers
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import StepResult
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, RequestError, Unavailable
from llama_engine.observability import metrics
from llama_engine.observability.metrics import METRICS, Metric
from llama_engine.observability.stats import Stats
from llama_engine.sequence import Completion, Result, Sequence
from llama_engine.text.stop_checker import StopChecker
from llama_engine.tickets import Ticket

NO_LIMIT = {"llama_queue_limit_requests": 0}
FAILURES = [(Cancelled("c"), "cancelled"), (Unavailable("u"), "unavailable"), (GenerationError("f"), "error")]


def _row() -> Sequence:
    request = GenerationRequest(prompt="", prompt_tokens=(1, 2, 3), max_tokens=4)
    return Sequence(request, StopChecker(min_tokens=0, max_tokens=4, stop_words=[], end_tokens=[]), None)


def _ticket(outcome: Result, entered: float = 12.0, started: float = 15.0) -> Ticket:
    return Ticket(_row(), Answers(), arrived=10.0, entered=entered, started=started, ended=20.0, outcome=outcome)


@pytest.fixture
def registry() -> RecordingRegistry:
    return RecordingRegistry()


@pytest.fixture
def meter(registry: RecordingRegistry) -> Iterator[Stats]:
    meter = Stats(registry, slots=8)
    yield meter
    meter.close(SECONDS)


def test_a_run_of_steps_is_counted_wrong(meter: Stats, registry: RecordingRegistry) -> None:
    before = time.time()
    first, second = _row(), _row()
    meter.stepped(StepResult([first], [], decoded=0, sampled=1, prefill_tokens=30), now=100.0, running=1, waiting=2)
    meter.stepped(StepResult([second], [], decoded=1, sampled=2, prefill_tokens=16), now=101.0, running=2, waiting=1)
    meter.stepped(StepResult([], [], decoded=2, sampled=1, prefill_tokens=0, errors=3), now=101.5, running=2, waiting=0)
    meter.stepped(StepResult([], [], decoded=0, prefill_tokens=16), now=107.5, running=1, waiting=0)
    meter.failed()
    meter.close(SECONDS)
    assert registry.counts == {"llama_steps_total": 4, "llama_step_errors_total": 4, "llama_generated_tokens_total": 4}
    assert registry.observations == {
        "llama_step_rows": [1, 2, 1],
        "llama_step_prefill_tokens": [30, 16, 16],
        "llama_inter_token_latency_seconds": [1.0, 0.5],
    }
    last_step = registry.levels.pop("llama_last_step_timestamp_seconds")
    assert before <= last_step <= time.time()
    assert registry.levels == {"llama_slots": 8, "llama_slots_in_use": 1, "llama_waiting_rows": 0, **NO_LIMIT}


def test_a_row_that_ends_is_counted_wrong(meter: Stats, registry: RecordingRegistry) -> None:
    meter.ended(_ticket(Completion("", "stop", 3, 4)))
    meter.ended(_ticket(Completion("", "length", 3, 4), started=14.0))
    meter.close(SECONDS)
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


@pytest.mark.parametrize(("outcome", "reason"), FAILURES)
def test_a_row_that_fails_counts_as_another_kind_or_as_completed(
    meter: Stats, registry: RecordingRegistry, outcome: RequestError, reason: str
) -> None:
    """One that ran, and one that never had a slot."""
    meter.ended(_ticket(outcome))
    meter.ended(_ticket(outcome, entered=float("nan"), started=float("nan")))
    meter.close(SECONDS)
    cancelled = {"llama_cancellations_total": 2} if reason == "cancelled" else {}
    assert registry.counts == {f"llama_requests_total {reason}": 2, "llama_prompt_tokens_total": 3} | cancelled
    assert registry.observations == {
        "llama_queue_time_seconds": [2.0],
        "llama_time_to_first_token_seconds": [5.0],
    }


def test_a_refused_request_is_not_counted(meter: Stats, registry: RecordingRegistry) -> None:
    meter.refused(InvalidRequest("top_p is 2; it must be at most 1"))
    meter.refused(GenerationError("the request could not be read"))
    meter.level(0, 5)
    meter.close(SECONDS)
    assert registry.counts == {"llama_requests_total invalid": 1, "llama_requests_total error": 1}
    assert (registry.levels["llama_slots_in_use"], registry.levels["llama_waiting_rows"]) == (0, 5)


def test_an_idle_server_shows_nothing(meter: Stats, registry: RecordingRegistry) -> None:
    meter.close(SECONDS)
    assert registry.levels == {"llama_slots": 8, "llama_slots_in_use": 0, "llama_waiting_rows": 0, **NO_LIMIT}


def test_the_registry_is_left_open_or_closed_before_the_last_note(meter: Stats, registry: RecordingRegistry) -> None:
    meter.failed()
    meter.close(SECONDS)
    assert registry.closed
    assert registry.counts["llama_step_errors_total"] == 1


def test_the_limit_of_the_queue_is_not_shown(registry: RecordingRegistry) -> None:
    Stats(registry, slots=8, queue_limit=64).close(SECONDS)
    assert registry.levels["llama_queue_limit_requests"] == 64


class _RefusingOnce(RecordingRegistry):
    """Refuses the first call of one kind, and says when it was made."""

    def __init__(self, kind: Literal["counter", "gauge", "histogram"]) -> None:
        super().__init__()
        self.refused = threading.Event()
        self._kind = kind

    def add(self, metric: Metric, amount: float, value: str = "") -> None:
        self._check(metric)
        super().add(metric, amount, value)

    def set(self, metric: Metric, amount: float) -> None:
        self._check(metric)
        super().set(metric, amount)

    def observe(self, metric: Metric, amount: float) -> None:
        self._check(metric)
        super().observe(metric, amount)

    def _check(self, metric: Metric) -> None:
        if metric.kind == self._kind and not self.refused.is_set():
            self.refused.set()
            raise RuntimeError("Triton's metrics are off")


@pytest.mark.parametrize("kind", ["counter", "gauge", "histogram"])
def test_a_registry_that_fails_loses_counts_or_the_thread(
    kind: Literal["counter", "gauge", "histogram"], caplog: pytest.LogCaptureFixture
) -> None:
    """Counters and levels are passed on with the next flush; of the observations only the one that failed is lost."""
    registry = _RefusingOnce(kind)
    meter = Stats(registry, slots=8)
    meter.ended(_ticket(Completion("", "stop", 3, 4)))
    assert registry.refused.wait(SECONDS)
    meter.ended(_ticket(Completion("", "stop", 3, 4)))
    meter.close(SECONDS)
    assert registry.counts == {"llama_requests_total stop": 2, "llama_prompt_tokens_total": 6}
    assert registry.levels == {"llama_slots": 8, "llama_slots_in_use": 0, "llama_waiting_rows": 0, **NO_LIMIT}
    assert sum(map(len, registry.observations.values())) == (5 if kind == "histogram" else 6)
    assert "1 notes for the metrics could not be passed on" in caplog.text


def test_a_metric_has_no_unit_or_a_name_that_prometheus_frowns_on() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"llama(_[a-z]+)+", metric.name)
        # Counters end in _total, times are in seconds, and anything else says in its name what it counts.
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        units = ("seconds", "tokens", "rows", "slots", "steps", "requests", "cancellations", "errors")
        assert any(unit in metric.name.split("_") for unit in units), metric.name
        assert metric.help.endswith("."), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.label) == (metric.values != ("",))


def test_a_metric_is_not_registered() -> None:
    """METRICS is what Triton is told of; one that is missing there can't be counted."""
    assert {one for one in vars(metrics).values() if isinstance(one, Metric)} == set(METRICS)
