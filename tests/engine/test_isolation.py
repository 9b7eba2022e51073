"""Failed computations are repeated in halves: only the sequence at fault fails, and no token is counted twice."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import repeat
from unittest.mock import DEFAULT, patch

import pytest
import torch
from engine.engines import Run, alone, engine_of, run
from engine.forward_passes import ForwardPass, watching
from engine.prompts import request_of, requests_of
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling.sampling_state import SamplingState
from llama_engine.sequence import Completion

FAILED = "decoding failed; the server's log has the reason"
EXHAUSTED, EXHAUSTED_ALONE = torch.OutOfMemoryError, "the device's memory was exhausted by this request alone"
LONG = 100
"""Prompt tokens of the request at fault, longer than the others' prompts: its passes can be told apart."""

Fails = Callable[[ForwardPass], bool]


@pytest.fixture
def engine(checkpoint: Checkpoint) -> Engine:
    return engine_of(checkpoint, 4)


def _with_a_long_one(checkpoint: Checkpoint, place: int) -> list[GenerationRequest]:
    requests = requests_of(checkpoint, 4)
    requests[place] = request_of(checkpoint, place, LONG)
    return requests


def _run(
    checkpoint: Checkpoint,
    engine: Engine,
    requests: list[GenerationRequest],
    fault: AbstractContextManager[None],
) -> tuple[Run, list[Completion]]:
    """Run the requests under a fault; return also their results without it, which the engine gives afterwards."""
    expected = alone(checkpoint, requests)
    with fault:
        faulty = run(engine, [engine.builder.build(request) for request in requests])
    assert engine.generate(requests) == expected
    return faulty, expected


def _failing(fails: Fails, error: type[Exception] = RuntimeError) -> AbstractContextManager[None]:
    """Fail the forward passes of which `fails` returns True."""

    def fail(one: ForwardPass) -> None:
        if fails(one):
            raise error("CUDA error: a secret of the machine")

    return watching(fail)


def _assert_only_fails(faulty: Run, place: int, expected: list[Completion], message: str = FAILED) -> None:
    results = faulty.results
    assert isinstance(results[place], GenerationError)
    assert str(results[place]) == message
    assert [*results[:place], *results[place + 1 :]] == [*expected[:place], *expected[place + 1 :]]


@pytest.mark.parametrize(
    ("error", "fails", "errors"),
    [
        # Pass 0 is the prefill of four prompts, pass 8 of the other two.
        *[(RuntimeError, lambda one, number=number: one.number == number, 1) for number in (0, 1, 3, 8, 9)],
        # Prompts that exhaust the memory together: four, two and two, and the last two of six.
        (EXHAUSTED, lambda one: not one.decodes and len(one.chunks) > 1, 4),
    ],
)
def test_a_pass_that_succeeds_when_it_is_repeated_in_parts_changes_no_result(
    checkpoint: Checkpoint, engine: Engine, error: type[Exception], fails: Fails, errors: int,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    faulty, expected = _run(checkpoint, engine, requests_of(checkpoint, 6), _failing(fails, error))
    assert faulty.results == expected
    assert faulty.errors == errors
    assert "a secret of the machine" in caplog.text


@pytest.mark.parametrize(
    ("error", "fails", "place", "message"),
    [
        (RuntimeError, lambda one: one.longest == LONG, 0, FAILED),
        (EXHAUSTED, lambda one: one.tokens >= LONG, 3, f"{EXHAUSTED_ALONE}, of {LONG} prompt tokens"),
        (RuntimeError, lambda one: one.decodes and one.last_position >= LONG, 2, FAILED),
        (RuntimeError, lambda one: one.decodes and one.last_position >= LONG + 3, 0, FAILED),
    ],
    ids=["prefill", "prefill exhausts the memory", "first decode step", "later decode step"],
)
def test_a_sequence_that_always_fails_costs_no_other_its_result(
    checkpoint: Checkpoint, engine: Engine, error: type[Exception], fails: Fails, place: int, message: str
) -> None:
    faulty, expected = _run(checkpoint, engine, _with_a_long_one(checkpoint, place), _failing(fails, error))
    _assert_only_fails(faulty, place, expected, message)
    # Passes over four sequences, two and one.
    assert faulty.errors == 3


def test_every_sequence_fails_while_every_pass_fails_and_the_engine_recovers(fp32: Checkpoint) -> None:
    requests = requests_of(fp32, 6)
    faulty, _ = _run(fp32, engine_of(fp32, 4), requests, _failing(lambda one: one.number >= 3))
    assert {str(result) for result in faulty.results} == {FAILED}


@pytest.mark.parametrize(("start", "width"), [(0, 48), (96, 4)], ids=["first", "last"])
def test_a_chunk_that_fails_costs_only_sequences_with_such_chunks(
    checkpoint: Checkpoint, start: int, width: int
) -> None:
    requests = _with_a_long_one(checkpoint, 1)
    chunk = _failing(lambda one: (one.chunks[0].start, one.tokens) == (start, width), EXHAUSTED)
    faulty, expected = _run(checkpoint, engine_of(checkpoint, 4, prefill_tokens="48"), requests, chunk)
    failed = [index for index, result in enumerate(faulty.results) if result != expected[index]]
    assert 1 in failed
    # Prompts of 49 tokens and more have a first chunk of 48, too.
    assert all(len(requests[index].prompt_tokens) > 48 for index in failed)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_head_that_takes_fewer_rows_changes_no_result(fp32: Checkpoint, most: int) -> None:
    """most: rows that the head takes at once; with 0 every sequence fails."""
    engine = engine_of(fp32, 4)
    logits = engine._model.logits

    def fail(hidden: torch.Tensor) -> torch.Tensor:
        if len(hidden) > most:
            raise RuntimeError("no room for logits")
        return logits(hidden)

    @contextmanager
    def fault() -> Iterator[None]:
        with patch.object(engine._model, "logits", fail):
            yield

    faulty, expected = _run(fp32, engine, requests_of(fp32, 4), fault())
    assert faulty.results == expected if most else {str(result) for result in faulty.results} == {FAILED}


@pytest.mark.parametrize("name", ["copy", "set"])
def test_every_sequence_has_a_result_when_changing_the_slots_fails_too(fp32: Checkpoint, name: str) -> None:
    """After some errors a GPU refuses every further call."""
    requests = requests_of(fp32, 6)
    # One that finishes before the others, so that its slot is reused.
    requests[0] = replace(requests[0], max_tokens=3, min_tokens=3)

    @contextmanager
    def refusing() -> Iterator[None]:
        refusal = RuntimeError("CUDA error: device-side assert triggered")
        with patch.object(SamplingState, name, side_effect=refusal):
            yield

    faulty, expected = _run(fp32, engine_of(fp32, 4), requests, refusing())
    assert any(isinstance(result, GenerationError) for result in faulty.results)
    assert all(isinstance(result, GenerationError) or result in expected for result in faulty.results)


@pytest.mark.parametrize(
    ("part", "method", "good_calls", "failures"),
    [
        # Computing the banned tokens fails twice: sampling is repeated, and succeeds.
        ("bad_words", "completing", 0, 2),
        ("bad_words", "completing", 0, 100),
        ("bad_words", "append", 0, 100),
        ("stop_checker", "add", 3, 100),
    ],
)
@pytest.mark.parametrize("place", [0, 3])
def test_a_sequence_whose_text_or_bad_words_fail_costs_no_other_its_result_and_counts_no_token_twice(
    fp32: Checkpoint, place: int, part: str, method: str, good_calls: int, failures: int
) -> None:
    engine, requests = engine_of(fp32, 4), [replace(one, bad_words=(b"\x00never",)) for one in requests_of(fp32, 4)]
    sequences = [engine.builder.build(request) for request in requests]
    effects = [*repeat(DEFAULT, good_calls), *repeat(RuntimeError("no text"), failures), *repeat(DEFAULT, 100)]
    sequence = sequences[place]
    broken = sequence.stop_checker if part == "stop_checker" else getattr(sequence.processor, f"_{part}")
    with patch.object(broken, method, wraps=getattr(broken, method), side_effect=effects):
        faulty = run(engine, sequences)
    expected = alone(fp32, requests)
    if failures == 2:
        assert faulty.results == expected
        assert faulty.errors == 2
    else:
        _assert_only_fails(faulty, place, expected)
