"""Admission, streaming, cancellation and shutdown: the order of sequences, when callers block, what clients receive."""

import itertools
import threading
from dataclasses import replace

import pytest
from engine.engines import alone
from engine.prompts import request_of, requests_of
from engine.scheduling import SECONDS, Running, client_of, running, scheduler_threads, sent_result, until
from llama_engine.engine import scheduler
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.errors import Cancelled, GenerationError, Stopping
from llama_engine.model.loader import LoadedModel
from llama_engine.observability.stats import Stats
from llama_engine.request.generation_request import GenerationRequest

STOPPING = "the server is stopping"


def _assert_unharmed(checkpoint: LoadedModel, *sequences: Sequence) -> None:
    """They have the results of the same requests, each alone in an engine."""
    expected = alone(checkpoint, [sequence.request for sequence in sequences])
    assert [sequence.result for sequence in sequences] == expected


def test_a_short_sequence_finishes_before_a_long_one_that_came_first(fp32: LoadedModel) -> None:
    with running(fp32, 3) as scheduled:
        (long,) = scheduled.add(request_of(fp32, 1, 12, 30))
        scheduled.pace.let(4)
        (short,) = scheduled.add(request_of(fp32, 2, 12, 3))
        # Pass 5 had begun when the short one came; pass 6 is its prefill, passes 7 and 8 its decode steps.
        scheduled.pace.let(8)
        assert short.result is not None
        assert long.num_output_tokens < 14
        scheduled.finish([long, short])
        _assert_unharmed(fp32, long, short)


def test_a_first_token_is_sent_before_the_others_decode(fp32: LoadedModel) -> None:
    with running(fp32, 2) as scheduled:
        (long,) = scheduled.add(request_of(fp32, 1, 12, 30))
        scheduled.pace.let(4)
        (new,) = scheduled.add(request_of(fp32, 2, 12, 3), stream=True)
        # Pass 5 had begun when the new one came; pass 6 is its prefill, and the decode pass of that step is held.
        scheduled.pace.let(2)
        until(lambda: client_of(new).chunks)
        assert len(client_of(new).chunks) == new.num_output_tokens == 1
        scheduled.finish([long, new])
        _assert_unharmed(fp32, long, new)


def test_waiting_for_admission_blocks_only_while_no_slot_is_free(fp32: LoadedModel) -> None:
    """Triton tells its batcher of no request while `execute` runs, and then looks half a second later."""
    with running(fp32, 2) as scheduled:
        (first,) = scheduled.add(request_of(fp32, 0, 12, 6))
        scheduled.pace.let(1)
        # The next step is held, so nothing is admitted; one slot is free.
        (second,) = scheduled.add(request_of(fp32, 1, 12, 4))
        scheduled.scheduler.wait_until_admitted([second])
        assert second.status is Status.WAITING
        (third,) = scheduled.add(request_of(fp32, 2, 12, 4))
        waiter = threading.Thread(target=scheduled.scheduler.wait_until_admitted, args=([third],))
        waiter.start()
        scheduled.pace.let(2)
        assert second.status is not Status.WAITING
        assert third.status is Status.WAITING
        assert waiter.is_alive()
        # The sixth step ends the first sequence.
        scheduled.pace.let(4)
        waiter.join(SECONDS)
        assert not waiter.is_alive()
        scheduled.finish([first, second, third])


def test_slots_go_to_lower_priorities_first(fp32: LoadedModel) -> None:
    priorities = [0, 5, -1, 0, 5, -1, -2]
    with running(fp32, 1) as scheduled:
        (first,) = scheduled.add(request_of(fp32, 0, 10, 9))
        scheduled.pace.let(2)
        waiting = [
            replace(request_of(fp32, row + 1, 20 + row, 1), priority=priority)
            for row, priority in enumerate(priorities)
        ]
        sequences = scheduled.add(*waiting[:3]) + scheduled.add(*waiting[3:])
        scheduled.finish([first, *sequences])
        # A sequence that runs keeps its slot.
        assert scheduled.pace.prompts == [10, 26, 22, 25, 20, 23, 21, 24]
        _assert_unharmed(fp32, first, *sequences)


def test_a_client_that_cannot_be_polled_hides_no_cancellation(fp32: LoadedModel) -> None:
    with running(fp32, 2) as scheduled:
        first, gone = scheduled.add(request_of(fp32, 0, 10, 9), request_of(fp32, 1, 12, 200))
        scheduled.pace.let(1)
        client_of(first).lost = True
        client_of(gone).cancel()
        scheduled.pace.let(1)
        assert isinstance(gone.result, Cancelled)
        scheduled.finish([first, gone])
        _assert_unharmed(fp32, first)


def _crowd(scheduled: Running, checkpoint: LoadedModel, max_tokens: int = 8) -> list[Sequence]:
    """Two sequences in their second decode step, and three that wait."""
    sequences = scheduled.add(*requests_of(checkpoint, 5, 12, max_tokens), stream=True)
    scheduled.pace.let(2)
    return sequences


def _begin_to_stop(scheduled: Running, drain_seconds: float) -> threading.Thread:
    """Stop the scheduler in a thread; return when it admits nothing any more."""
    thread = threading.Thread(target=scheduled.scheduler.stop, args=(drain_seconds,))
    thread.start()
    probe = GenerationRequest(prompt="", prompt_tokens=(5,), max_tokens=1)
    until(lambda: scheduled.add(probe)[0].result is not None)
    return thread


def test_shutdown_completes_running_sequences_alone(fp32: LoadedModel) -> None:
    with running(fp32, 2) as scheduled:
        sequences = _crowd(scheduled, fp32)
        stopping = _begin_to_stop(scheduled, SECONDS)
        scheduled.pace.let(1)
        assert [sequence.result is None for sequence in sequences] == [True, True, False, False, False]
        scheduled.pace.run_free()
        stopping.join(SECONDS)
        assert scheduler_threads() == []
        sequences += scheduled.add(request_of(fp32, 1))
        scheduled.scheduler.wait_until_admitted(sequences)
        scheduled.scheduler.wait_until_finished(sequences)
        assert scheduled.dispatcher.close(SECONDS)
        assert scheduled.pace.prompts == [12]
        results = [sent_result(sequence) for sequence in sequences]
        assert results[:2] == alone(fp32, [sequence.request for sequence in sequences[:2]])
        assert {(type(result), str(result)) for result in results[2:]} == {(Stopping, STOPPING)}


def test_sequences_that_exceed_the_drain_time_are_answered_with_an_error(fp32: LoadedModel) -> None:
    with running(fp32, 2) as scheduled:
        sequences = _crowd(scheduled, fp32, max_tokens=400)
        stopping = _begin_to_stop(scheduled, 0)
        scheduled.pace.run_free()
        stopping.join(SECONDS)
        assert scheduler_threads() == []
        assert scheduled.dispatcher.close(SECONDS)
        assert [str(sent_result(sequence)) for sequence in sequences] == [STOPPING] * 5
        assert scheduled.engine.num_sequences == 0
        # No step after the one that was running.
        assert sequences[0].num_output_tokens == 3


def test_a_step_that_hangs_delays_neither_the_shutdown_nor_the_results(
    fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "HANG_SECONDS", 0.2)
    with running(fp32, 2) as scheduled:
        sequences = _crowd(scheduled, fp32)
        scheduled.scheduler.stop(0)
        assert [str(sequence.result) for sequence in sequences] == [STOPPING] * 5
        # `stop` waits HANG_SECONDS for this one, too.
        for thread in scheduler_threads():
            if thread.name == "cancellation":
                thread.join(SECONDS)
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


def test_every_sequence_is_answered_when_the_scheduler_itself_fails(
    fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = itertools.count(1)

    def fail_at_every_third_step(*_: object) -> None:
        if next(steps) % 3 == 0:
            raise RuntimeError("no number")

    monkeypatch.setattr(Stats, "record_step", fail_at_every_third_step)
    with running(fp32, 2) as scheduled:
        scheduled.pace.run_free()
        requests = [request_of(fp32, index, 12, 1 + index % 3) for index in range(12)]
        sequences = [*scheduled.add(*requests[::2], stream=True), *scheduled.add(*requests[1::2])]
        results = scheduled.finish(sequences)
        good = [sequence for sequence in sequences if isinstance(sequence.result, Completion)]
        assert len(good) >= 2
        assert [sequence.result for sequence in good] == alone(fp32, [sequence.request for sequence in good])
        assert all(isinstance(result, GenerationError | Completion) for result in results)
        assert scheduled.engine.num_sequences == 0


def test_every_sequence_is_answered_when_a_slot_cannot_be_freed(
    fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(fp32, 3) as scheduled:
        sequences = scheduled.add(*requests_of(fp32, 4, 12, 9))
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
        assert [results[3]] == alone(fp32, [sequences[3].request])
