"""Sequences that are late or cancelled, while they wait and while they run."""

import time

import pytest
from engine.requests import request_of
from engine.scheduling import client_of, results_alone, running
from llama_engine.errors import Cancelled, Unavailable
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Sequence, Status


def _unharmed(checkpoint: Checkpoint, *sequences: Sequence) -> bool:
    return [sequence.result for sequence in sequences] == results_alone(checkpoint, *sequences)


def test_a_late_sequence_is_refused_at_once_and_never_computed(fp32: Checkpoint) -> None:
    with running(fp32, 1) as scheduled:
        first = scheduled.add(request_of(fp32, 0, 10, 40))
        scheduled.pace.let(2)
        late = scheduled.add(request_of(fp32, 1, 33), deadline=time.monotonic() - 1)
        patient = scheduled.add(request_of(fp32, 2, 21, 3), deadline=time.monotonic() + 3600)
        scheduled.pace.let(1)
        assert first.result is None
        assert isinstance(late.result, Unavailable)
        scheduled.scheduler.wait_until_admitted([late])
        scheduled.finish([first, late, patient])
        assert str(late.result) == "the request's time was up before it got a slot"
        assert scheduled.pace.prompts == [10, 21]
        assert _unharmed(fp32, first, patient)


def test_the_deadline_does_not_apply_to_a_sequence_that_has_a_slot(fp32: Checkpoint) -> None:
    with running(fp32, 1) as scheduled:
        sequence = scheduled.add(request_of(fp32, 0, 10, 4), deadline=time.monotonic() + 3600)
        scheduled.pace.let(1)
        sequence.deadline = 0.0
        scheduled.finish([sequence])
        assert _unharmed(fp32, sequence)


def test_a_sequence_cancelled_while_it_waits_is_never_computed(fp32: Checkpoint) -> None:
    with running(fp32, 1) as scheduled:
        first = scheduled.add(request_of(fp32, 0, 10, 9))
        scheduled.pace.let(2)
        gone, other = scheduled.add(request_of(fp32, 1, 33)), scheduled.add(request_of(fp32, 2, 21, 3))
        client_of(gone).cancel()
        scheduled.pace.let(1)
        assert isinstance(gone.result, Cancelled)
        assert first.result is None
        scheduled.finish([first, gone, other])
        assert scheduled.pace.prompts == [10, 21]
        assert _unharmed(fp32, first, other)


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_sequence_frees_its_slot_and_changes_no_neighbour(fp32: Checkpoint, stream: bool) -> None:
    with running(fp32, 3) as scheduled:
        sequences = scheduled.add_all([request_of(fp32, size, size, 20) for size in (10, 12, 14)], stream=stream)
        scheduled.pace.let(4)
        waiting = scheduled.add(request_of(fp32, 21, 21, 3))
        gone = sequences[0]
        client_of(gone).cancel()
        assert waiting.status is Status.WAITING
        tokens = gone.num_output_tokens
        scheduled.pace.let(1)
        # The pass that was running when the cancellation was noticed, and none after it.
        assert gone.num_output_tokens == tokens + 1
        assert isinstance(gone.result, Cancelled)
        assert waiting.status is not Status.WAITING
        scheduled.finish([*sequences, waiting])
        assert _unharmed(fp32, *sequences[1:], waiting)
        assert str(gone.result) == "the request was cancelled"


def test_a_prompt_is_not_computed_further_after_its_cancellation(fp32: Checkpoint) -> None:
    with running(fp32, 2, prefill_tokens="16") as scheduled:
        first = scheduled.add(request_of(fp32, 0, 10, 20))
        scheduled.pace.let(2)
        long = scheduled.add(request_of(fp32, 1, 90))
        scheduled.pace.let(4)
        client_of(long).cancel()
        scheduled.pace.let(1)
        scheduled.finish([first, long])
        assert isinstance(long.result, Cancelled)
        assert 1 <= scheduled.pace.prompts.count(16) <= 3
        assert _unharmed(fp32, first)


def test_a_sequence_whose_client_cannot_be_polled_completes_and_hides_no_cancellation(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        first, gone = scheduled.add_all([request_of(fp32, 0, 10, 9), request_of(fp32, 1, 12, 200)])
        scheduled.pace.let(1)
        client_of(first).refuses = "is_cancelled"
        client_of(gone).cancel()
        scheduled.pace.let(1)
        assert isinstance(gone.result, Cancelled)
        scheduled.finish([first, gone])
        assert _unharmed(fp32, first)
