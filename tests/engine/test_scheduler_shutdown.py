"""Shutdown, and failures inside the scheduler: every sequence gets exactly one result."""

import pytest
from engine.requests import request_of, requests_of
from engine.scheduling import SECONDS, Running, client_of, results_alone, running, scheduler_threads, sent_result
from llama_engine import scheduler
from llama_engine.engine import Engine, StepResult
from llama_engine.errors import GenerationError, Unavailable
from llama_engine.model.loader import Checkpoint
from llama_engine.observability.stats import Stats
from llama_engine.sequence import Completion, Sequence

STOPPING = "the server is stopping"


def _crowd(scheduled: Running, checkpoint: Checkpoint, max_tokens: int = 8) -> list[Sequence]:
    """Two sequences in their second decode step, and three that wait."""
    sequences = scheduled.add_all(requests_of(checkpoint, 5, 12, max_tokens), stream=True)
    scheduled.pace.let(2)
    return sequences


def test_shutdown_completes_running_sequences_and_refuses_waiting_ones(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        sequences = _crowd(scheduled, fp32)
        stopping = scheduled.begin_to_stop(SECONDS)
        scheduled.pace.let(1)
        assert [sequence.result is None for sequence in sequences] == [True, True, False, False, False]
        scheduled.pace.run_free()
        stopping.join(SECONDS)
        assert scheduled.dispatcher.close(SECONDS)
        assert scheduler_threads() == []
        assert scheduled.pace.prompts == [12]
        assert [sent_result(sequence) for sequence in sequences[:2]] == results_alone(fp32, *sequences[:2])
        for sequence in sequences[2:]:
            assert isinstance(sequence.result, Unavailable)
            assert str(sent_result(sequence)) == STOPPING


def test_sequences_that_exceed_the_drain_time_are_answered_with_an_error(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        sequences = _crowd(scheduled, fp32, max_tokens=400)
        stopping = scheduled.begin_to_stop(0)
        scheduled.pace.run_free()
        stopping.join(SECONDS)
        assert scheduler_threads() == []
        assert scheduled.dispatcher.close(SECONDS)
        assert [str(sent_result(sequence)) for sequence in sequences] == [STOPPING] * 5
        assert scheduled.engine.used_slots == 0
        # No step after the one that was running.
        assert sequences[0].num_output_tokens == 3


def test_a_sequence_added_after_the_shutdown_is_refused(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        scheduled.scheduler.stop(SECONDS)
        late = scheduled.add(request_of(fp32, 1))
        scheduled.scheduler.wait_until_admitted([late])
        scheduled.scheduler.wait_until_finished([late])
        assert scheduled.dispatcher.close(SECONDS)
        assert str(sent_result(late)) == STOPPING


def test_a_step_that_hangs_delays_neither_the_shutdown_nor_the_results(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HANG_SECONDS", 0.2)
    with running(fp32, 2) as scheduled:
        sequences = _crowd(scheduled, fp32)
        scheduled.scheduler.stop(0)
        assert [str(sequence.result) for sequence in sequences] == [STOPPING] * 5
        (hanging,) = scheduler_threads()
        assert hanging.name == "engine"
        # It returns after all, with tokens for sequences that were answered long ago.
        scheduled.pace.run_free()
        hanging.join(SECONDS)
        assert scheduled.dispatcher.close(SECONDS)
        assert [str(sent_result(sequence)) for sequence in sequences] == [STOPPING] * 5
        scheduled.stats.close(SECONDS)
        assert scheduled.registry.counts["llama_requests_total unavailable"] == 5
        assert scheduled.registry.counts["llama_step_errors_total"] == 0


class _BrokenStats(Stats):
    """Fails at every finished sequence, and at every third step."""

    steps = 0

    def record_finished(self, sequence: Sequence) -> None:
        raise RuntimeError("no number")

    def record_step(self, step: StepResult, now: float, running: int, waiting: int) -> None:
        self.steps += 1
        if self.steps % 3 == 0:
            raise RuntimeError("no number")


def test_every_sequence_is_answered_when_the_scheduler_itself_fails(fp32: Checkpoint) -> None:
    with running(fp32, 2, stats=_BrokenStats) as scheduled:
        scheduled.pace.run_free()
        sequences = [
            scheduled.add(request_of(fp32, index, 12, 1 + index % 3), stream=index % 2 == 0) for index in range(12)
        ]
        results = scheduled.finish(sequences)
        good = [sequence for sequence in sequences if isinstance(sequence.result, Completion)]
        assert len(good) >= 2
        assert [sequence.result for sequence in good] == results_alone(fp32, *good)
        assert all(isinstance(result, GenerationError | Completion) for result in results)
        assert scheduled.engine.used_slots == 0


def test_every_sequence_is_answered_when_a_slot_cannot_be_freed(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(fp32, 3) as scheduled:
        sequences = scheduled.add_all(requests_of(fp32, 4, 12, 9))
        scheduled.pace.let(2)
        client_of(sequences[0]).cancel()
        remove, failures = Engine.remove, iter([True])

        def refuse_once(engine: Engine, sequence: Sequence) -> None:
            if next(failures, False):
                raise RuntimeError("device lost")
            remove(engine, sequence)

        monkeypatch.setattr(Engine, "remove", refuse_once)
        results = scheduled.finish(sequences)
        assert str(results[0]) == "the request was cancelled"
        assert all(isinstance(result, GenerationError) for result in results[1:3])
        assert [results[3]] == results_alone(fp32, sequences[3])


def test_a_client_that_cannot_be_sent_to_costs_no_other_its_result(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        sequences = scheduled.add_all(requests_of(fp32, 4, 12), stream=True)
        client_of(sequences.pop(1)).refuses = "send"
        scheduled.pace.run_free()
        scheduled.scheduler.wait_until_finished(sequences)
        scheduled.scheduler.stop(SECONDS)
        assert scheduled.dispatcher.close(SECONDS)
        assert [sent_result(sequence) for sequence in sequences] == results_alone(fp32, *sequences)
