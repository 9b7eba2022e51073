"""Health and readiness of a model: steps that hang, steps that fail, and how it becomes ready again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from engine.forward_passes import ForwardPass, watching
from engine.registries import RecordingRegistry
from engine.scheduling import SECONDS, STUCK_SECONDS, Running, running
from engine.sequences import finished_sequence
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import StepResult
from llama_engine.errors import GenerationError
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.health import MAX_FAILED_STEPS, EngineHealth
from llama_engine.observability.readiness import Readiness
from llama_engine.observability.stats import Stats
from llama_engine.scheduler import Scheduler
from llama_engine.sequence import FAILURE, Completion

REQUEST = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=3, min_tokens=3)
FINISHED = [finished_sequence(FAILURE)]
BAD, GOOD, PREFILL = StepResult(FINISHED, errors=1), StepResult(sampled=1), StepResult(prefill_tokens=16)


class _Fault:
    """Fails every forward pass until it is mended. A pass waits while `go` is cleared."""

    def __init__(self) -> None:
        self.mended, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.passes = 0

    def __call__(self, one: ForwardPass) -> None:
        self.passes += 1
        assert self.go.wait(SECONDS)
        if not self.mended.is_set():
            raise RuntimeError("no kernel")


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def _fail_until_broken(scheduled: Running) -> int:
    """Return how many sequences it took."""
    count = 0
    while not scheduled.scheduler.failing:
        sequence = scheduled.add(REQUEST)
        scheduled.scheduler.wait_until_finished([sequence])
        assert isinstance(sequence.result, GenerationError)
        count += 1
    return count


@pytest.mark.parametrize(
    ("step", "failed"),
    [
        (StepResult(sampled=2), False),
        # One sequence failed, and another one didn't.
        (StepResult(FINISHED, sampled=1, errors=3), False),
        # A part of a long prompt.
        (PREFILL, False),
        (StepResult(FINISHED, prefill_tokens=16, errors=1), True),
        # Logits that aren't finite raise no exception.
        (StepResult(FINISHED, decoded=1), True),
        (StepResult(errors=1), True),
    ],
)
def test_a_step_has_failed_if_it_produced_only_failures(step: StepResult, failed: bool) -> None:
    assert step.failed is failed


def test_prefills_do_not_hide_that_every_step_which_should_sample_fails() -> None:
    registry = RecordingRegistry()
    stats, health = Stats(registry, slots=8), EngineHealth(60)
    for step in [StepResult(FINISHED, prefill_tokens=16, errors=1), PREFILL, PREFILL] * MAX_FAILED_STEPS:
        health.record_step(step)
        stats.record_step(step, now=100.0, running=0, waiting=0)
    assert health.failing
    health.record_step(GOOD)
    assert not health.failing
    stats.close(SECONDS)
    assert "llama_last_step_timestamp_seconds" not in registry.levels


def test_a_step_beyond_its_bound_is_reported_and_idle_time_is_not() -> None:
    now = 1000.0
    health = EngineHealth(60, lambda: now)
    assert health.problem() == ""
    health.record_busy()
    now += 60
    assert health.problem() == ""
    now += 1
    assert health.problem() == "a step has been running for more than 60 s"
    health.record_step(GOOD)
    health.record_idle()
    now += 600
    assert health.problem() == ""


def test_a_bound_of_zero_disables_the_check() -> None:
    now = 1000.0
    health = EngineHealth(0, lambda: now)
    health.record_busy()
    now += 1e6
    assert health.problem() == ""


def test_only_consecutive_failures_make_an_engine_broken() -> None:
    health = EngineHealth(60)
    for step in [*[BAD] * (MAX_FAILED_STEPS - 1), GOOD, *[BAD] * (MAX_FAILED_STEPS - 1)]:
        health.record_step(step)
        assert not health.failing
        assert health.problem() == ""
    health.record_error()
    assert health.failing
    assert health.problem() == f"{MAX_FAILED_STEPS} or more consecutive steps have failed"


def test_a_model_is_ready_while_it_waits_or_steps_and_not_while_a_step_is_stuck(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(fp32, 2) as scheduled:
        readiness = Readiness(scheduled.engine, scheduled.scheduler)
        assert readiness.check()
        sequences = scheduled.add_all([REQUEST] * 3)
        scheduled.pace.let(1)
        assert readiness.check()
        # From here on every running step takes too long.
        monkeypatch.setattr(scheduled.scheduler._health, "_clock", lambda: time.monotonic() + STUCK_SECONDS)
        assert not readiness.check()
        scheduled.pace.run_free()
        scheduled.scheduler.wait_until_finished(sequences)
        _until(readiness.check)


def test_a_model_that_fails_every_step_is_not_ready_until_its_own_trial_succeeds(
    fp32: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no requests while it isn't ready."""
    fault = _Fault()
    with running(fp32, 2) as scheduled, watching(fp32, fault):
        scheduled.pace.run_free()
        readiness = Readiness(scheduled.engine, scheduled.scheduler)
        _fail_until_broken(scheduled)
        for _ in range(3):
            assert not readiness.check()
        assert caplog.text.count("the model isn't ready: ") == 1
        fault.mended.set()
        _until(readiness.check)
        _until(lambda: not scheduled.scheduler.failing)
        good = scheduled.add(REQUEST)
        scheduled.scheduler.wait_until_finished([good])
        assert isinstance(good.result, Completion)
    # The scheduler has stopped.
    assert not readiness.check()


def test_a_failing_model_runs_one_trial_at_a_time(fp32: Checkpoint) -> None:
    fault = _Fault()
    with running(fp32, 2) as scheduled, watching(fp32, fault):
        scheduled.pace.run_free()
        count = _fail_until_broken(scheduled)
        fault.go.clear()
        passes = fault.passes
        readiness = Readiness(scheduled.engine, scheduled.scheduler)
        for _ in range(5):
            assert not readiness.check()
        _until(lambda: fault.passes > passes)
        for _ in range(5):
            assert not readiness.check()
        fault.go.set()
        scheduled.scheduler.stop(SECONDS)
        scheduled.stats.close(SECONDS)
        assert scheduled.registry.counts["llama_requests_total error"] == count + 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_whose_engine_thread_has_ended_is_not_ready(fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: Scheduler) -> None:
        # The one exception that ends a thread silently.
        raise SystemExit

    with running(fp32, 2) as scheduled:
        readiness = Readiness(scheduled.engine, scheduled.scheduler)
        monkeypatch.setattr(Scheduler, "_admit", end)
        scheduled.add(REQUEST)
        _until(lambda: scheduled.scheduler.problem() == "the engine's thread has ended")
        assert not readiness.check()


def test_failures_outside_of_steps_make_an_engine_broken(fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Scheduler, step: StepResult) -> None:
        raise RuntimeError("no report")

    with running(fp32, 2) as scheduled:
        scheduled.pace.run_free()
        monkeypatch.setattr(Scheduler, "_report", fail)
        assert _fail_until_broken(scheduled) >= MAX_FAILED_STEPS
        assert "consecutive steps have failed" in scheduled.scheduler.problem()
