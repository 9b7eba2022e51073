"""Admission and streaming: the order of sequences, when callers block, and what their clients receive."""

import random
import threading
from collections.abc import Callable

import pytest
from engine.forward_passes import ForwardPass, watching
from engine.requests import request_of, requests_of
from engine.scheduling import SECONDS, Running, client_of, results_alone, running
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import GenerationError
from llama_engine.model.loader import Checkpoint
from llama_engine.sequence import Completion, Sequence, Status


def _wait_in_thread(scheduled: Running, sequence: Sequence, then: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        scheduled.scheduler.wait_until_admitted([sequence])
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_a_short_sequence_finishes_before_a_long_one_that_came_first(fp32: Checkpoint) -> None:
    with running(fp32, 3) as scheduled:
        long = scheduled.add(request_of(fp32, 1, 12, 30))
        scheduled.pace.let(4)
        short = scheduled.add(request_of(fp32, 2, 12, 3))
        scheduled.pace.let(8)
        assert short.result is not None
        assert long.result is None
        # Pass 5 had begun when the short one came; pass 6 is its prefill, passes 7 and 8 its decode steps.
        assert long.num_output_tokens < 14
        assert scheduled.finish([long, short]) == results_alone(fp32, long, short)


def test_sequences_that_arrive_at_any_time_keep_their_texts_and_their_order(fp32: Checkpoint) -> None:
    randomness = random.Random(4)
    with running(fp32, 3, prefill_tokens="16") as scheduled:
        sequences = [scheduled.add(request_of(fp32, 0, 12, 20))]
        for index in range(1, 16):
            scheduled.pace.let(randomness.randint(0, 3))
            size, max_tokens = randomness.choice((5, 20, 50)), randomness.randint(1, 9)
            sequences.append(scheduled.add(request_of(fp32, index, size, max_tokens)))
        assert scheduled.finish(sequences) == results_alone(fp32, *sequences)
        for times in zip(*((one.admitted_at, one.first_token_at) for one in sequences), strict=True):
            assert list(times) == sorted(times)


def test_a_long_prompt_keeps_its_place_among_short_ones(fp32: Checkpoint) -> None:
    """Sequences wait whenever a slot is free."""
    with running(fp32, 2, prefill_tokens="16") as scheduled:
        requests = requests_of(fp32, 25, 12, 4)
        requests[4] = request_of(fp32, 4, 90, 4)
        sequences = scheduled.add_all(requests)
        scheduled.finish(sequences)
        long, after = sequences[4], sequences[5:]
        assert all(sequence.admitted_at >= long.admitted_at for sequence in after)
        assert long.finished_at < after[-1].finished_at
        assert scheduled.pace.prompts.count(16) == 5
        assert all(sequence.first_token_at > long.first_token_at for sequence in after)


def test_waiting_for_admission_blocks_until_a_slot_is_free(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        first = scheduled.add_all([request_of(fp32, 0, 12, 6), request_of(fp32, 1, 12, 9)])
        scheduled.pace.let(1)
        scheduled.scheduler.wait_until_admitted(first)
        third = scheduled.add(request_of(fp32, 3, 12, 2))
        finished: list[int] = []
        waiter = _wait_in_thread(
            scheduled, third, lambda: finished.append(sum(sequence.result is not None for sequence in first))
        )
        scheduled.pace.let(3)
        assert third.status is Status.WAITING
        assert waiter.is_alive()
        scheduled.pace.run_free()
        waiter.join(SECONDS)
        assert finished[0] >= 1
        scheduled.finish([*first, third])


def test_waiting_for_admission_does_not_wait_for_a_step_while_a_slot_is_free(fp32: Checkpoint) -> None:
    """Triton tells its batcher of no request while `execute` runs, and then looks half a second later."""
    with running(fp32, 2) as scheduled:
        first = scheduled.add(request_of(fp32, 0, 12, 6))
        scheduled.pace.let(1)
        # The next step is held, so nothing is admitted; one slot is free.
        second = scheduled.add(request_of(fp32, 1, 12, 4))
        scheduled.scheduler.wait_until_admitted([second])
        assert second.status is Status.WAITING
        third = scheduled.add(request_of(fp32, 2, 12, 4))
        waiter = _wait_in_thread(scheduled, third, lambda: None)
        scheduled.pace.let(2)
        assert second.status is not Status.WAITING
        assert waiter.is_alive()
        scheduled.pace.run_free()
        waiter.join(SECONDS)
        assert not waiter.is_alive()
        scheduled.finish([first, second, third])


@pytest.mark.parametrize("prompted", [False, True])
def test_chunks_join_to_the_text_that_is_sent_without_streaming(fp32: Checkpoint, prompted: bool) -> None:
    prompt = "def f(🙂):"
    request = GenerationRequest(
        prompt=prompt, prompt_tokens=fp32.tokenizer.encode(prompt), max_tokens=25,
        stop_words=(b"never", b"\n\n\n\n"), temperature=1.0, seed=5, exclude_input_in_output=not prompted,
    )  # fmt: skip
    with running(fp32, 4) as scheduled:
        streamed, plain = scheduled.add(request, stream=True), scheduled.add(request)
        result, expected = scheduled.finish([streamed, plain])
    chunks = client_of(streamed).chunks
    assert isinstance(result, Completion)
    assert result == expected
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert sum(chunk.num_tokens for chunk in chunks) == result.num_output_tokens
    assert len(chunks) > 5
    assert client_of(plain).chunks == []


def test_every_sequence_is_answered_while_every_pass_fails_and_later_ones_complete(fp32: Checkpoint) -> None:
    broken = threading.Event()
    broken.set()

    def fail(one: ForwardPass) -> None:
        if broken.is_set():
            raise RuntimeError("no kernel")

    with running(fp32, 2) as scheduled, watching(fp32, fail):
        scheduled.pace.run_free()
        failed = [scheduled.add(request, stream=True) for request in requests_of(fp32, 5, 12, 5)]
        scheduled.scheduler.wait_until_finished(failed)
        broken.clear()
        good = scheduled.add(request_of(fp32, 9, 12, 5))
        *results, last = scheduled.finish([*failed, good])
        assert all(isinstance(result, GenerationError) for result in results)
        assert [last] == results_alone(fp32, good)
