"""Sequences that wait for their guides: they delay no other, and are cancelled, late and drained as all that wait."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engine.engines import alone
from engine.prompts import request_of, requests_of
from engine.scheduling import SECONDS, Client, Running, client_of, running, sent_result
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, Unavailable
from llama_engine.guide_starter import MAX_WAITING_GUIDES
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling import guided as guides_module
from llama_engine.sequence import Completion, RequestContext, Sequence, Status

PLAIN = GenerationRequest("", tuple(range(40, 52)), max_tokens=40, temperature=1.0, seed=3)


def guided(pattern: str, **values: object) -> GenerationRequest:
    asked = replace(PLAIN, guided_decoding_guide_type="regex", guided_decoding_guide=pattern)
    return replace(asked, **values)  # type: ignore[arg-type]  # values are fields


@contextmanager
def held(scheduled: Running) -> Iterator[threading.Semaphore]:
    """Hold every guide, as a hostile one does, until the semaphore is released; it is for all at the end."""
    go, start = threading.Semaphore(0), scheduled.engine.start_guide

    def hold(sequence: Sequence) -> None:
        assert go.acquire(timeout=SECONDS)
        start(sequence)

    scheduled.engine.start_guide = hold  # type: ignore[method-assign]  # a stand-in
    try:
        yield go
    finally:
        go.release(100)


def texts_of(sequences: list[Sequence]) -> list[str]:
    """The texts of sequences that have completed."""
    assert all(isinstance(one.result, Completion) for one in sequences)
    return [one.result.text for one in sequences if isinstance(one.result, Completion)]


def choices_of(scheduled: Running, request: GenerationRequest) -> list[Sequence]:
    """The choices of a request that shares one client."""
    return scheduled.engine.choices(request, RequestContext(Client()))


def complete(scheduled: Running, sequences: list[Sequence]) -> list[str]:
    scheduled.scheduler.add(sequences)
    scheduled.scheduler.wait_until_finished(sequences)
    return texts_of(sequences)


def test_a_guide_that_takes_long_delays_no_other_sequence(fp32: Checkpoint) -> None:
    plain = requests_of(fp32, 3, 12)
    with running(fp32, 2) as scheduled, held(scheduled) as go:
        scheduled.pace.run_free()
        (slow,) = scheduled.add(guided("[a-c]{5}"))
        scheduled.scheduler.wait_until_admitted([slow])
        others = scheduled.add(*plain)
        scheduled.scheduler.wait_until_admitted(others)
        scheduled.scheduler.wait_until_finished(others)
        assert slow.status is Status.WAITING
        go.release()
        scheduled.scheduler.wait_until_finished([slow])
        # A guide that is known by now starts with the request.
        (soon,) = scheduled.add(guided("[a-c]{5}"))
        assert soon.is_ready
        *results, _, again = scheduled.finish([*others, slow, soon])
    assert results == alone(fp32, plain)
    assert slow.result == again
    assert re.fullmatch("[a-c]{5}", texts_of([soon])[0])


def test_a_free_slot_is_not_kept_for_a_sequence_that_waits_for_its_guide(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled, held(scheduled) as go:
        (first,) = scheduled.add(request_of(fp32, 0, 12, 6))
        scheduled.pace.let(1)
        scheduled.add(guided("ab"))
        # The next step is held, so nothing is admitted; one slot is free.
        (second,) = scheduled.add(request_of(fp32, 1, 12, 4))
        waiter = threading.Thread(target=scheduled.scheduler.wait_until_admitted, args=([second],))
        waiter.start()
        waiter.join(SECONDS)
        assert not waiter.is_alive()
        assert second.status is Status.WAITING
        go.release()
        scheduled.finish([first, second])


def test_a_sequence_whose_guide_has_started_waits_for_a_slot_as_others_do(fp32: Checkpoint) -> None:
    with running(fp32, 1) as scheduled:
        (first,) = scheduled.add(request_of(fp32, 0, 12, 6))
        scheduled.pace.let(1)
        (second,) = scheduled.add(guided("ab"))
        while not second.is_ready:
            time.sleep(0.001)
        waiter = threading.Thread(target=scheduled.scheduler.wait_until_admitted, args=([second],))
        waiter.start()
        # One that comes while its guide starts must not pass either: the queue is Triton's.
        third = scheduled.add(guided("abc"))
        later = threading.Thread(target=scheduled.scheduler.wait_until_admitted, args=(third,))
        later.start()
        scheduled.pace.let(3)
        assert second.status is Status.WAITING
        assert waiter.is_alive()
        assert later.is_alive()
        scheduled.finish([first, second, *third])
        for thread in (waiter, later):
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert texts_of([second, *third]) == ["ab", "abc"]


def test_a_sequence_that_waits_for_its_guide_is_cancelled(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled, held(scheduled):
        scheduled.pace.run_free()
        first, second = scheduled.add(guided("ab"), guided("cd"))
        client_of(first).cancelled = client_of(second).cancelled = True
        scheduled.scheduler.wait_until_finished([first, second])
        assert {type(one.result) for one in (first, second)} == {Cancelled}
        assert not scheduled.engine.used_slots


def test_the_time_of_a_sequence_ends_while_nothing_but_its_guide_is_waited_for(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled, held(scheduled) as go:
        (patient,) = scheduled.add(guided("ab"))
        (late,) = scheduled.add(guided("cd"), deadline=time.monotonic() + 0.2)
        scheduled.scheduler.wait_until_finished([late])
        assert isinstance(late.result, Unavailable)
        assert "time was up" in str(late.result)
        assert patient.result is None
        # Its guide isn't begun any more: those of the two others are enough.
        (after,) = scheduled.add(guided("ef"))
        go.release(2)
        scheduled.pace.run_free()
        scheduled.scheduler.wait_until_finished([patient, after])
    assert texts_of([patient, after]) == ["ab", "ef"]


def test_a_shutdown_answers_sequences_that_wait_for_their_guides(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled, held(scheduled):
        sequences = scheduled.add(guided("ab"), guided("cd"))
        scheduled.scheduler.stop(SECONDS)
        sequences += scheduled.add(guided("ef"))
        assert scheduled.dispatcher.close(SECONDS)
        for one in sequences:
            assert isinstance(sent_result(one), Unavailable)


def test_a_bounded_number_of_guides_waits(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled, held(scheduled) as go:
        scheduled.pace.run_free()
        sequences = scheduled.add(*(guided(f"a{index}") for index in range(MAX_WAITING_GUIDES)))
        (refused,) = scheduled.add(guided("b"))
        assert isinstance(refused.result, Unavailable)
        assert "too many guides" in str(refused.result)
        go.release(MAX_WAITING_GUIDES)
        scheduled.scheduler.wait_until_finished(sequences)
        go.release(48)
        # There is room again; the choices of a request need one guide.
        choices = [one for index in range(3) for one in choices_of(scheduled, guided(f"c{index}", n=16))]
        assert complete(scheduled, choices) == [f"c{row // 16}" for row in range(48)]
    assert texts_of(sequences) == [f"a{index}" for index in range(MAX_WAITING_GUIDES)]


def learn(scheduled: Running, pattern: str) -> None:
    """Let the engine check a guide, so that it is known."""
    scheduled.engine.start_guide(scheduled.engine.sequence(guided(pattern)))


def test_only_the_first_choice_of_a_known_guide_starts_with_the_request(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        learn(scheduled, "[a-c]{5}")
        choices = choices_of(scheduled, guided("[a-c]{5}", n=16))
        assert [one.is_ready for one in choices] == [True] + [False] * 15
        scheduled.pace.run_free()
        assert all(re.fullmatch("[a-c]{5}", text) for text in complete(scheduled, choices))


def test_the_choices_of_a_known_guide_wait_for_no_other_guide(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        learn(scheduled, "ab")
        start, go = scheduled.engine.start_guide, threading.Event()

        def hold_others(sequence: Sequence) -> None:
            assert sequence.request.guided_decoding_guide == "ab" or go.wait(SECONDS)
            start(sequence)

        scheduled.engine.start_guide = hold_others  # type: ignore[method-assign]  # a stand-in
        scheduled.pace.run_free()
        (other,) = scheduled.add(guided("cd"))
        assert complete(scheduled, choices_of(scheduled, guided("ab", n=4))) == ["ab"] * 4
        assert other.result is None
        go.set()
        scheduled.scheduler.wait_until_finished([other])


def test_requests_take_turns_to_start_the_guides_of_their_choices(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guides_module, "SOON_SECONDS", -1.0)
    with running(fp32, 8) as scheduled, held(scheduled) as go:
        started: list[str] = []
        start = scheduled.engine.start_guide

        def record(sequence: Sequence) -> None:
            start(sequence)
            started.append(sequence.request.guided_decoding_guide)

        scheduled.engine.start_guide = record  # type: ignore[method-assign]  # a stand-in
        scheduled.pace.run_free()
        go.release(6)
        asked = (guided("ab", n=3), guided("cd"), guided("ef", n=2))
        complete(scheduled, [choice for request in asked for choice in choices_of(scheduled, request)])
    assert started == ["ab", "cd", "ef", "ab", "ef", "ab"]


def test_no_more_guides_than_slots_are_started_for_sequences_that_wait(fp32: Checkpoint) -> None:
    with running(fp32, 2) as scheduled:
        most, start = [0], scheduled.engine.start_guide

        def count(sequence: Sequence) -> None:
            start(sequence)
            most.append(sum(one.is_ready and one.status is Status.WAITING for one in choices))

        scheduled.engine.start_guide = count  # type: ignore[method-assign]  # a stand-in
        busy = scheduled.add(request_of(fp32, 0, 12, 6), request_of(fp32, 1, 12, 6))
        choices = choices_of(scheduled, guided("[a-c]{5}", n=16))
        scheduled.scheduler.add(choices)
        # Both slots are taken and nothing runs, so that the next guide would be too many.
        while len(most) < 3:
            time.sleep(0.001)
        scheduled.pace.run_free()
        scheduled.scheduler.wait_until_finished([*busy, *choices])
    assert len(most) == 17
    assert max(most) == 2
    assert len(texts_of(choices)) == 16


def test_a_refused_guide_and_one_that_cannot_start_fail_alone(
    fp32: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = requests_of(fp32, 2, 12)
    with running(fp32, 2) as scheduled:
        start = scheduled.engine._builder.guides.start

        def fail(kind: str, text: str) -> object:
            if text == "cd":
                raise RuntimeError("no process")
            return start(kind, text)

        monkeypatch.setattr(scheduled.engine._builder.guides, "start", fail)
        refused, failed, *others = scheduled.finish(scheduled.add(guided("("), guided("cd"), *plain))
        # The next time it is refused before it waits.
        with pytest.raises(InvalidRequest, match="guided_decoding_guide is refused: "):
            scheduled.engine.sequence(guided("("))
    assert isinstance(refused, InvalidRequest)
    assert str(refused).startswith("guided_decoding_guide is refused: ")
    assert isinstance(failed, GenerationError)
    assert "no process" not in str(failed)
    assert others == alone(fp32, plain)
