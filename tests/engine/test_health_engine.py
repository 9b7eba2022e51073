"""What the model itself says of its health: to Triton when that asks, and in the metrics that the probe reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from engine.forward_passes import ForwardPass, watching
from engine.registries import RecordingRegistry
from engine.scheduling import SECONDS, STUCK_SECONDS, House, house
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import StepResult
from llama_engine.errors import GenerationError
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.health import MAX_FAILED_STEPS, EngineHealth
from llama_engine.observability.readiness import Readiness
from llama_engine.observability.stats import Stats
from llama_engine.scheduler import Scheduler
from llama_engine.sequence import Completion, Sequence
from llama_engine.text.stop_checker import StopChecker

REQUEST = GenerationRequest(prompt="", prompt_tokens=(5, 6, 7), max_tokens=3, min_tokens=3)


class Fault:
    """Fails every forward pass while it is there, and can hold them before."""

    def __init__(self) -> None:
        self._gone = threading.Event()
        self._go = threading.Event()
        self._go.set()
        self.passes = 0

    def __call__(self, one: ForwardPass) -> None:
        self.passes += 1
        assert self._go.wait(SECONDS)
        if not self._gone.is_set():
            raise RuntimeError("no kernel")

    def mend(self) -> None:
        self._gone.set()

    def hold(self) -> None:
        self._go.clear()

    def let_go(self) -> None:
        self._go.set()


def _row() -> Sequence:
    return Sequence(REQUEST, StopChecker(min_tokens=0, max_tokens=4, stop_words=[], end_tokens=[]), None)


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


def _fail_until_broken(home: House) -> int:
    """Return how many rows it took."""
    rows = 0
    while not home.scheduler.failing:
        ticket = home.submit(REQUEST)
        home.scheduler.wait_until_finished([ticket])
        assert isinstance(ticket.result, GenerationError)
        rows += 1
    return rows


@pytest.mark.parametrize(
    ("step", "failed"),
    [
        (StepResult([], [], sampled=2), False),
        # Somebody failed, and others didn't.
        (StepResult([], [_row()], sampled=1, errors=3), False),
        # A part of a long prompt was read.
        (StepResult([], [], prefill_tokens=16), False),
        (StepResult([], [_row()], prefill_tokens=16, errors=1), True),
        # Logits that aren't finite are no exception.
        (StepResult([], [_row()], decoded=1), True),
        (StepResult([], [], errors=1), True),
    ],
)
def test_a_step_of_failures_counts_as_one(step: StepResult, failed: bool) -> None:
    assert step.failed is failed


def test_a_step_of_failures_looks_like_life_to_the_probe() -> None:
    registry = RecordingRegistry()
    meter = Stats(registry, slots=8)
    meter.stepped(StepResult([], [_row()], errors=1), now=100.0, running=0, waiting=0)
    meter.close(SECONDS)
    assert registry.counts["llama_steps_total"] == 1
    assert "llama_last_step_timestamp_seconds" not in registry.levels


def test_reading_prompts_hides_that_no_token_can_be_chosen() -> None:
    """Long prompts are read in steps that choose nothing, and come while every step that should choose fails."""
    registry = RecordingRegistry()
    meter = Stats(registry, slots=8)
    notes = EngineHealth(60)
    read, bad, good = (
        StepResult([], [], prefill_tokens=16),
        StepResult([], [_row()], prefill_tokens=16, errors=1),
        StepResult([], [], sampled=1),
    )
    for step in [bad, read, read] * MAX_FAILED_STEPS:
        notes.stepped(step)
        meter.stepped(step, now=100.0, running=0, waiting=0)
    assert notes.failing
    notes.stepped(good)
    assert not notes.failing
    meter.close(SECONDS)
    assert "llama_last_step_timestamp_seconds" not in registry.levels


def test_reading_a_long_prompt_looks_like_a_stuck_engine() -> None:
    registry = RecordingRegistry()
    meter = Stats(registry, slots=8)
    for step in (
        StepResult([], [_row()], errors=1),
        StepResult([], [], sampled=1),
        StepResult([], [], prefill_tokens=16),
    ):
        before = time.time()
        meter.stepped(step, now=100.0, running=0, waiting=0)
    meter.close(SECONDS)
    assert registry.levels["llama_last_step_timestamp_seconds"] >= before


def test_a_round_that_takes_too_long_is_not_noticed() -> None:
    now = 1000.0
    notes = EngineHealth(60, lambda: now)
    assert notes.problem() == "", "it has never had anything to do"
    notes.working()
    now += 60
    assert notes.problem() == ""
    now += 1
    assert notes.problem() == "a step has been running for more than 60 s"
    notes.stepped(StepResult([], [], sampled=1))
    notes.resting()
    now += 600
    assert notes.problem() == "", "it waits for work"


def test_a_bound_of_none_is_one() -> None:
    now = 1000.0
    notes = EngineHealth(0, lambda: now)
    notes.working()
    now += 1e6
    assert notes.problem() == ""


def test_one_bad_request_makes_a_model_broken_or_many_do_not() -> None:
    notes = EngineHealth(60)
    bad, good = StepResult([], [_row()], errors=1), StepResult([], [], sampled=1)
    for _ in range(MAX_FAILED_STEPS - 1):
        notes.stepped(bad)
    assert notes.problem() == ""
    notes.stepped(good)
    for _ in range(MAX_FAILED_STEPS - 1):
        notes.stepped(bad)
    assert not notes.failing
    notes.failed()
    assert notes.failing
    assert notes.problem()


def test_a_model_that_waits_or_works_is_not_ready(fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    with house(fp32, 2) as home:
        readiness = Readiness(home.engine, home.scheduler)
        assert readiness.check()
        tickets = home.submit_all([REQUEST] * 3)
        home.pace.let(1)
        assert readiness.check(), "in the middle of a step, with a row that waits"
        # From here on every step that is under way takes too long.
        monkeypatch.setattr(home.scheduler._vitals, "_clock", lambda: time.monotonic() + STUCK_SECONDS)
        assert not readiness.check()
        home.pace.run_free()
        home.scheduler.wait_until_finished(tickets)
        _until(readiness.check)


def test_a_model_that_fails_every_step_is_ready_or_for_ever_not(
    fp32: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody sends it requests any more; asked whether it is ready, it tries itself."""
    fault = Fault()
    with house(fp32, 2) as home, watching(fp32, fault):
        home.pace.run_free()
        readiness = Readiness(home.engine, home.scheduler)
        _fail_until_broken(home)
        for _ in range(3):
            assert not readiness.check()
        assert caplog.text.count("the model isn't ready: ") == 1
        fault.mend()
        _until(readiness.check)
        _until(lambda: not home.scheduler.failing)
        good = home.submit(REQUEST)
        home.scheduler.wait_until_finished([good])
        assert isinstance(good.result, Completion)
    assert not readiness.check(), "its scheduler has stopped"


def test_a_failing_model_is_tried_with_more_than_a_row_at_a_time(fp32: Checkpoint) -> None:
    fault = Fault()
    with house(fp32, 2) as home, watching(fp32, fault):
        home.pace.run_free()
        rows = _fail_until_broken(home)
        fault.hold()
        passes = fault.passes
        readiness = Readiness(home.engine, home.scheduler)
        for _ in range(5):
            assert not readiness.check()
        _until(lambda: fault.passes > passes)
        for _ in range(5):
            assert not readiness.check()
        fault.let_go()
        home.scheduler.stop(SECONDS)
        home.meter.close(SECONDS)
        assert home.registry.counts["llama_requests_total error"] == rows + 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_model_without_its_thread_is_ready(fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(self: Scheduler) -> None:
        # The one exception that a thread ends of without a word.
        raise SystemExit

    with house(fp32, 2) as home:
        readiness = Readiness(home.engine, home.scheduler)
        monkeypatch.setattr(Scheduler, "_let_in", end)
        home.submit(REQUEST)
        _until(lambda: home.scheduler.problem() == "the engine's thread has ended")
        assert not readiness.check()


def test_a_failure_outside_of_the_steps_counts_as_none(fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Scheduler, step: StepResult) -> None:
        raise RuntimeError("no report")

    with house(fp32, 2) as home:
        home.pace.run_free()
        monkeypatch.setattr(Scheduler, "_report", fail)
        assert _fail_until_broken(home) >= MAX_FAILED_STEPS
        assert "in a row have failed" in home.scheduler.problem()
