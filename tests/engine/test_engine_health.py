"""Health and readiness of a model: steps that hang, steps that fail, and how it becomes ready again."""

import threading
import time

import pytest
from engine.forward_passes import ForwardPass, watching
from engine.metrics import finished_sequence
from engine.scheduling import SECONDS, STUCK_SECONDS, Running, running, until
from llama_engine.engine.events import FAILURE, Completion
from llama_engine.engine.scheduler import Scheduler
from llama_engine.engine.step_health import MAX_FAILED_STEPS, StepHealth
from llama_engine.engine.step_result import StepResult
from llama_engine.errors import GenerationError, InvalidRequest
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.readiness import Readiness
from llama_engine.request.generation_request import GenerationRequest

REQUEST = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=3, min_tokens=3)
FINISHED, INVALID = [finished_sequence(FAILURE)], [finished_sequence(InvalidRequest("no token is allowed"))]
BAD, GOOD, PREFILL = StepResult(FINISHED, errors=1), StepResult(sampled=1), StepResult(prefill_tokens=16)
BROKEN = f"{MAX_FAILED_STEPS} or more consecutive steps have failed"


class _Fault:
    """Fails every forward pass until it is mended. A pass waits while `go` is cleared."""

    def __init__(self) -> None:
        self.mended, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.passes = 0

    def __call__(self, forward: ForwardPass) -> None:
        self.passes += 1
        assert self.go.wait(SECONDS)
        if not self.mended.is_set():
            raise RuntimeError("no kernel")


def _fail_until_broken(scheduled: Running) -> int:
    """Return how many sequences it took."""
    scheduled.pace.run_free()
    count = 0
    while not scheduled.scheduler.failing:
        (sequence,) = scheduled.add(REQUEST)
        scheduled.scheduler.wait_until_finished([sequence])
        assert isinstance(sequence.result, GenerationError)
        count += 1
    return count


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([*[BAD] * (MAX_FAILED_STEPS - 1), GOOD, BAD], ""),
        ([BAD] * MAX_FAILED_STEPS, BROKEN),
        ([*[BAD] * MAX_FAILED_STEPS, GOOD], ""),
        # Prefills don't hide that every step which should sample fails, and are no failures.
        ([BAD, PREFILL, PREFILL] * MAX_FAILED_STEPS, BROKEN),
        ([PREFILL] * MAX_FAILED_STEPS, ""),
        # One sequence failed, and another one didn't.
        ([StepResult(FINISHED, sampled=1, errors=3)] * MAX_FAILED_STEPS, ""),
        # Logits that aren't finite raise no exception.
        ([StepResult(FINISHED, decoded=1)] * MAX_FAILED_STEPS, BROKEN),
        ([StepResult(errors=1)] * MAX_FAILED_STEPS, BROKEN),
        # A mistake of the client.
        ([StepResult(INVALID, decoded=1)] * MAX_FAILED_STEPS, ""),
        ([StepResult(INVALID, errors=1)] * MAX_FAILED_STEPS, BROKEN),
        ([StepResult([*INVALID, *FINISHED])] * MAX_FAILED_STEPS, BROKEN),
    ],
)
def test_consecutive_failed_steps_break_an_engine(steps: list[StepResult], problem: str) -> None:
    health = StepHealth(60)
    for step in steps:
        health.record_step(step)
    assert (health.failing, health.problem()) == (bool(problem), problem)


def test_a_model_is_not_ready_while_a_step_is_stuck(fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(fp32, 2) as scheduled:
        readiness = Readiness(scheduled.engine, scheduled.scheduler)
        assert readiness.check()
        sequences = scheduled.add(REQUEST, REQUEST, REQUEST)
        scheduled.pace.let(1)
        assert readiness.check()
        # From here on every running step takes too long.
        monkeypatch.setattr(scheduled.scheduler._health, "_clock", lambda: time.monotonic() + STUCK_SECONDS)
        assert not readiness.check()
        scheduled.pace.run_free()
        scheduled.scheduler.wait_until_finished(sequences)
        until(readiness.check)


def test_a_model_that_fails_every_step_is_not_ready_until_a_probe_succeeds(
    fp32: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """It gets no requests while it isn't ready, and runs one probe at a time."""
    fault = _Fault()
    with running(fp32, 2) as scheduled, watching(fault):
        readiness = Readiness(scheduled.engine, scheduled.scheduler)
        count = _fail_until_broken(scheduled)
        fault.go.clear()
        passes = fault.passes
        for _ in range(5):
            assert not readiness.check()
        until(lambda: fault.passes > passes)
        for _ in range(5):
            assert not readiness.check()
        assert caplog.text.count("the model isn't ready: ") == 1
        fault.mended.set()
        fault.go.set()
        until(lambda: readiness.check() and not scheduled.scheduler.failing)
        (good,) = scheduled.add(REQUEST)
        scheduled.scheduler.wait_until_finished([good])
        assert isinstance(good.result, Completion)
        scheduled.scheduler.stop(SECONDS)
        assert not readiness.check()
        scheduled.stats.close(SECONDS)
        assert scheduled.registry.counts["llama_requests_total error"] == count
        # The probe and the good one; a second probe if a check came before the step of the first was accounted for.
        assert 2 <= scheduled.registry.counts["llama_requests_total length"] <= 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_whose_engine_thread_has_ended_is_not_ready(fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: Scheduler) -> None:
        # The one exception that ends a thread silently.
        raise SystemExit

    with running(fp32, 2) as scheduled:
        readiness = Readiness(scheduled.engine, scheduled.scheduler)
        monkeypatch.setattr(Scheduler, "_admit", end)
        scheduled.add(REQUEST)
        until(lambda: scheduled.scheduler.problem() == "the engine's thread has ended")
        assert not readiness.check()


def test_failures_outside_of_steps_make_an_engine_broken(fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Scheduler, step: StepResult) -> None:
        raise RuntimeError("no report")

    with running(fp32, 2) as scheduled:
        monkeypatch.setattr(Scheduler, "_report", fail)
        assert _fail_until_broken(scheduled) >= MAX_FAILED_STEPS
        assert scheduled.scheduler.problem() == BROKEN
