"""Sequences that wait for their guides: they delay no other, and are cancelled, late and drained as all that wait."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from engine.engines import alone
from engine.prompts import request_of, requests_of
from engine.scheduling import SECONDS, Client, Running, client_of, running, sent_result, until
from llama_engine.engine import guide_queue
from llama_engine.engine.events import Completion, RequestContext
from llama_engine.engine.guide_queue import MAX_WAITING_GUIDES
from llama_engine.engine.sequence import Sequence, Status
from llama_engine.errors import Cancelled, GenerationError, InvalidRequest, Unavailable
from llama_engine.guides.matcher import GuideState
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest

PLAIN = GenerationRequest("", tuple(range(40, 52)), max_tokens=40, temperature=1.0, seed=3)


def guided(pattern: str, n: int = 1) -> GenerationRequest:
    return replace(PLAIN, guided_decoding_guide_type="regex", guided_decoding_guide=pattern, n=n)


@contextmanager
def held(scheduled: Running) -> Iterator[threading.Semaphore]:
    """Hold every guide, as a hostile one does, until the semaphore is released; it is for all at the end."""
    go, compiled = threading.Semaphore(0), scheduled.engine.guides._compile

    def hold(kind: str, text: str) -> GuideState:
        assert go.acquire(timeout=SECONDS)
        return compiled(kind, text)

    scheduled.engine.guides._compile = hold  # type: ignore[method-assign]  # a stand-in
    try:
        yield go
    finally:
        go.release(1000)


def texts_of(sequences: list[Sequence]) -> list[str]:
    """The texts of sequences that have completed."""
    results = [sequence.result for sequence in sequences]
    assert all(isinstance(result, Completion) for result in results), results
    return [result.text for result in results if isinstance(result, Completion)]


def add_choices(scheduled: Running, request: GenerationRequest) -> list[Sequence]:
    """Add the choices of a request."""
    sequences = scheduled.engine.builder.choices(request, RequestContext(Client()))
    scheduled.scheduler.add(sequences)
    return sequences


def test_a_guide_that_takes_long_delays_no_other_sequence(fp32: LoadedModel) -> None:
    plain = requests_of(fp32, 3, 12)
    with running(fp32, 2) as scheduled, held(scheduled) as go:
        scheduled.pace.run_free()
        (slow,) = scheduled.add(guided("[a-c]{5}"))
        scheduled.scheduler.wait_until_admitted([slow])
        others = scheduled.add(*plain)
        scheduled.scheduler.wait_until_admitted(others)
        scheduled.scheduler.wait_until_finished(others)
        assert slow.status is Status.WAITING_FOR_GUIDE
        go.release()
        *results, _ = scheduled.finish([*others, slow])
    assert results == alone(fp32, plain)
    assert re.fullmatch("[a-c]{5}", texts_of([slow])[0])


def test_the_time_of_a_sequence_ends_while_it_waits_for_its_guide(
    fp32: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with running(fp32, 3) as scheduled, held(scheduled) as go:
        (patient,) = scheduled.add(guided("ab"))
        (late,) = scheduled.add(guided("cd"), deadline=time.monotonic() + 0.2)
        scheduled.scheduler.wait_until_finished([late])
        assert isinstance(late.result, Unavailable)
        assert "time was up" in str(late.result)
        assert patient.result is None
        # Its guide isn't compiled any more: those of the two others are enough.
        (after,) = scheduled.add(guided("ef"))
        go.release(2)
        scheduled.pace.run_free()
        scheduled.scheduler.wait_until_finished([patient, after])
    assert texts_of([patient, after]) == ["ab", "ef"]
    assert "compiling the guide" not in caplog.text


def test_waiting_for_a_guide_ends_with_a_cancellation_or_a_shutdown(fp32: LoadedModel) -> None:
    with running(fp32, 2) as scheduled, held(scheduled):
        gone, *sequences = scheduled.add(guided("ab"), guided("cd"), guided("ef"))
        client_of(gone).cancelled = True
        scheduled.scheduler.wait_until_finished([gone])
        assert isinstance(gone.result, Cancelled)
        scheduled.scheduler.stop(SECONDS)
        sequences += scheduled.add(guided("gh"))
        assert scheduled.dispatcher.close(SECONDS)
        assert all(isinstance(sent_result(sequence), Unavailable) for sequence in sequences)


def test_a_bounded_number_of_requests_waits_for_guides(fp32: LoadedModel) -> None:
    with running(fp32, 2) as scheduled, held(scheduled) as go:
        scheduled.pace.run_free()
        # The choices of a request count once.
        sequences = add_choices(scheduled, guided("[ab]", n=16))
        sequences += scheduled.add(*[guided("[ab]")] * (MAX_WAITING_GUIDES - 1))
        (refused,) = scheduled.add(guided("b"))
        assert isinstance(refused.result, Unavailable)
        assert "too many guides" in str(refused.result)
        go.release(1000)
        scheduled.scheduler.wait_until_finished(sequences)
        # There is room again.
        sequences += scheduled.add(guided("b"))
        scheduled.scheduler.wait_until_finished(sequences)
    assert set(texts_of(sequences)) == {"a", "b"}


def test_no_more_guides_than_slots_are_compiled_for_sequences_that_wait(fp32: LoadedModel) -> None:
    with running(fp32, 2) as scheduled:
        busy = scheduled.add(request_of(fp32, 0, 12, 6), request_of(fp32, 1, 12, 6))
        scheduled.pace.let(2)
        choices = add_choices(scheduled, guided("[a-c]{5}", n=16))
        until(lambda: all(choice.status is not Status.WAITING_FOR_GUIDE for choice in choices[:2]))
        scheduled.pace.let(2)
        assert [choice.guide is None for choice in choices] == [False] * 2 + [True] * 14
        scheduled.pace.run_free()
        scheduled.scheduler.wait_until_finished([*busy, *choices])
    assert all(re.fullmatch("[a-c]{5}", text) for text in texts_of(choices))


def test_guides_that_are_refused_or_break_fail_alone(fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = requests_of(fp32, 2, 12)
    with running(fp32, 2) as scheduled:
        guides = scheduled.engine.guides
        compiled = guides._compile

        def fail(kind: str, text: str) -> GuideState:
            if text == "cd":
                raise RuntimeError("no process")
            return compiled(kind, text)

        monkeypatch.setattr(guides, "_compile", fail)
        refused, failed, *others = scheduled.finish(scheduled.add(guided("("), guided("cd"), *plain))
    assert isinstance(refused, InvalidRequest)
    assert str(refused).startswith("guided_decoding_guide is refused: ")
    assert isinstance(failed, GenerationError)
    assert "no process" not in str(failed)
    assert others == alone(fp32, plain)


def test_execute_does_not_wait_behind_a_guide_that_takes_long(
    fp32: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guide_queue, "GUIDE_SECONDS", 1.0)
    with running(fp32, 2) as scheduled, held(scheduled):
        (slow,) = scheduled.add(guided("ab"))
        scheduled.scheduler.wait_until_admitted([slow])
        (second,) = scheduled.add(guided("cd"))
        began = time.monotonic()
        scheduled.scheduler.wait_until_admitted([second])
        assert time.monotonic() - began < guide_queue.GUIDE_SECONDS
