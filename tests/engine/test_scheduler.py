"""Admission, streaming and cancellation: the order of sequences, when callers block, what clients receive."""

import random
import threading
import time
from dataclasses import replace

import pytest
from engine.engines import alone
from engine.prompts import request_of
from engine.scheduling import SECONDS, client_of, running
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.errors import Cancelled, Unavailable
from llama_engine.model.loader import LoadedModel


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


def test_sequences_that_arrive_at_any_time_have_their_texts(fp32: LoadedModel) -> None:
    randomness = random.Random(4)
    with running(fp32, 3, prefill_tokens="16") as scheduled:
        sequences = scheduled.add(request_of(fp32, 0, 12, 20))
        for index in range(1, 16):
            scheduled.pace.let(randomness.randint(0, 3))
            size, max_tokens = randomness.choice((5, 20, 50)), randomness.randint(1, 9)
            sequences += scheduled.add(request_of(fp32, index, size, max_tokens))
        scheduled.finish(sequences)
        _assert_unharmed(fp32, *sequences)
        for times in zip(*((sequence.admitted_at, sequence.first_token_at) for sequence in sequences), strict=True):
            assert list(times) == sorted(times)


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


@pytest.mark.parametrize(
    ("seconds", "error", "message"),
    [(-1, Unavailable, "the request's time was up before it got a slot"), (60, Cancelled, "the request was cancelled")],
)
def test_a_sequence_late_or_cancelled_while_it_waits_is_never_computed(
    fp32: LoadedModel, seconds: float, error: type[Exception], message: str
) -> None:
    with running(fp32, 1) as scheduled:
        (first,) = scheduled.add(request_of(fp32, 0, 10, 40))
        scheduled.pace.let(2)
        # A deadline doesn't apply to a sequence that has a slot.
        first.context = replace(first.context, deadline=0.0)
        (gone,) = scheduled.add(request_of(fp32, 1, 33), deadline=time.monotonic() + seconds)
        (patient,) = scheduled.add(request_of(fp32, 2, 21, 3), deadline=time.monotonic() + 3600)
        if error is Cancelled:
            client_of(gone).cancel()
        scheduled.pace.let(1)
        assert isinstance(gone.result, error)
        assert first.result is None
        scheduled.scheduler.wait_until_admitted([gone])
        assert str(scheduled.finish([gone, first, patient])[0]) == message
        assert scheduled.pace.prompts == [10, 21]
        _assert_unharmed(fp32, first, patient)


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
