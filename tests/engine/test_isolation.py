"""Failed computations are repeated in halves: only the sequence at fault fails, and no token is counted twice."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import pytest
import torch
from engine.engines import completions, engine_of
from engine.forward_passes import ForwardPass, before_each_head, watching
from engine.requests import request_of, requests_of
from engine.stepping import Run, run_requests, run_sequences
from llama_engine.api.request_parser import GenerationRequest
from llama_engine.engine import Engine
from llama_engine.errors import GenerationError
from llama_engine.model.kv_cache import KVCache
from llama_engine.model.loader import Checkpoint
from llama_engine.sampling.sampler import SamplingState
from llama_engine.sequence import Completion
from llama_engine.text.bad_words import BadWords
from llama_engine.text.stop_checker import StopChecker
from llama_engine.text.tokenizer import Vocabulary

FAILED = "decoding failed; the server's log has the reason"
EXHAUSTED = torch.OutOfMemoryError
LONG = 100
"""Prompt tokens of the request at fault, longer than the others' prompts: its passes can be told apart."""


def _with_a_long_one(checkpoint: Checkpoint, place: int) -> list[GenerationRequest]:
    requests = requests_of(checkpoint, 4)
    requests[place] = request_of(checkpoint, place, LONG)
    return requests


def _run(
    engine: Engine, requests: list[GenerationRequest], fault: AbstractContextManager[None]
) -> tuple[Run, list[Completion]]:
    """Run the requests under a fault; return also their results without it, which the engine gives again afterwards."""
    expected = completions(engine, requests)
    with fault:
        run = run_requests(engine, requests)
    assert engine.generate(requests) == expected
    return run, expected


def _assert_only_fails(run: Run, place: int, expected: list[Completion], message: str = FAILED) -> None:
    assert isinstance(run.results[place], GenerationError)
    assert str(run.results[place]) == message
    assert [*run.results[:place], *run.results[place + 1 :]] == [*expected[:place], *expected[place + 1 :]]


def _failing(
    checkpoint: Checkpoint, fails: Callable[[ForwardPass], bool], error: type[Exception] = RuntimeError
) -> AbstractContextManager[None]:
    """Fail the forward passes of which `fails` returns True."""

    def fail(one: ForwardPass) -> None:
        if fails(one):
            raise error("CUDA error: a secret of the machine")

    return watching(checkpoint, fail)


@pytest.fixture
def engine(fp32: Checkpoint) -> Engine:
    return engine_of(fp32, 4)


@pytest.mark.parametrize("number", [0, 1, 3, 8, 9])
def test_a_pass_that_fails_once_changes_no_result(
    fp32: Checkpoint, engine: Engine, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Six requests on four slots: pass 0 is the prefill of four prompts, pass 8 of the other two."""
    run, expected = _run(engine, requests_of(fp32, 6), _failing(fp32, lambda one: one.number == number))
    assert run.results == expected
    assert run.errors == 1
    assert "a secret of the machine" in caplog.text


@pytest.mark.parametrize("place", [0, 2, 3])
@pytest.mark.parametrize("first_bad_position", [None, LONG, LONG + 3])
def test_a_sequence_that_always_fails_costs_no_other_its_result(
    fp32: Checkpoint, engine: Engine, place: int, first_bad_position: int | None
) -> None:
    """In its prefill (None), in its first decode step, and in a later one."""

    def fails(one: ForwardPass) -> bool:
        if first_bad_position is None:
            return one.width == LONG
        return one.width == 1 and int(one.positions.max()) >= first_bad_position

    run, expected = _run(engine, _with_a_long_one(fp32, place), _failing(fp32, fails))
    _assert_only_fails(run, place, expected)
    # Passes over four sequences, two and one.
    assert run.errors == 3


def test_every_sequence_fails_while_every_pass_fails_and_the_engine_recovers(fp32: Checkpoint, engine: Engine) -> None:
    run, _ = _run(engine, requests_of(fp32, 6), _failing(fp32, lambda one: one.number >= 3))
    assert {str(result) for result in run.results} == {FAILED}


def test_prompts_that_exhaust_the_memory_together_are_computed_apart(fp32: Checkpoint, engine: Engine) -> None:
    requests = requests_of(fp32, 4, range(30, 60))
    run, expected = _run(engine, requests, _failing(fp32, lambda one: one.tokens.numel() > 60, EXHAUSTED))
    assert run.results == expected
    # Four prompts, two and two.
    assert run.errors == 3


def test_a_prompt_that_exhausts_the_memory_alone_is_named_in_its_error(fp32: Checkpoint, engine: Engine) -> None:
    run, expected = _run(
        engine, _with_a_long_one(fp32, 2), _failing(fp32, lambda one: one.tokens.numel() >= LONG, EXHAUSTED)
    )
    message = f"the device's memory was exhausted by this request alone, of {LONG} prompt tokens"
    _assert_only_fails(run, 2, expected, message)


@pytest.mark.parametrize(("start", "width"), [(0, 48), (96, 4)], ids=["first", "last"])
def test_a_chunk_that_fails_costs_only_sequences_with_such_chunks(fp32: Checkpoint, start: int, width: int) -> None:
    requests = _with_a_long_one(fp32, 1)
    chunk = _failing(fp32, lambda one: (int(one.positions[0, 0]), one.width) == (start, width), EXHAUSTED)
    run, expected = _run(engine_of(fp32, 4, prefill_tokens="48"), requests, chunk)
    failed = [index for index, result in enumerate(run.results) if result != expected[index]]
    assert 1 in failed
    # Prompts of 49 tokens and more have a first chunk of 48, too.
    assert all(len(requests[index].prompt_tokens) > 48 for index in failed)


@pytest.mark.parametrize("most", [0, 1, 2])
def test_a_head_that_takes_fewer_rows_changes_no_result(fp32: Checkpoint, engine: Engine, most: int) -> None:
    """most: rows that the head takes at once; with 0 every sequence fails."""

    def fail(rows: int) -> None:
        if rows > most:
            raise RuntimeError("no room for logits")

    run, expected = _run(engine, requests_of(fp32, 4), before_each_head(fp32, fail))
    assert run.results == expected if most else {str(result) for result in run.results} == {FAILED}


@pytest.mark.parametrize(("owner", "name"), [(KVCache, "zero"), (KVCache, "copy"), (SamplingState, "set")])
def test_every_sequence_has_a_result_when_the_recovery_fails_too(
    fp32: Checkpoint, engine: Engine, owner: type[object], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some errors a GPU refuses every further call."""
    requests = requests_of(fp32, 6)
    # One that finishes before the others, so that its slot is reused.
    requests[0] = replace(requests[0], max_tokens=3, min_tokens=3)

    @contextmanager
    def refusing() -> Iterator[None]:
        def refuse(*args: object) -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        with monkeypatch.context() as broken, _failing(fp32, lambda one: name == "zero"):
            broken.setattr(owner, name, refuse)
            yield

    run, expected = _run(engine, requests, refusing())
    assert any(isinstance(result, GenerationError) for result in run.results)
    assert all(isinstance(result, GenerationError) or result in expected for result in run.results)


class _BrokenBadWords(BadWords):
    """Bad words of which one method fails this many times."""

    def __init__(self, vocabulary: Vocabulary, method: str, times: int) -> None:
        super().__init__([b"\x00never"], vocabulary, torch.device("cpu"))
        self._method = method
        self._times = times

    def completing(self) -> torch.Tensor:
        self._fail("completing")
        return super().completing()

    def append(self, token_bytes: bytes) -> None:
        self._fail("append")
        super().append(token_bytes)

    def _fail(self, method: str) -> None:
        if method == self._method and self._times:
            self._times -= 1
            raise RuntimeError(f"no {method}")


class _BrokenStopChecker(StopChecker):
    def add(self, token: int, token_bytes: bytes) -> bool:
        if self.num_tokens == 3:
            raise RuntimeError("no text")
        return super().add(token, token_bytes)


def _run_one_broken(engine: Engine, requests: list[GenerationRequest], place: int, **broken: object) -> Run:
    """Run the requests; the sequence at `place` has these attributes replaced."""
    sequences = [engine.sequence(request) for request in requests]
    for name, value in broken.items():
        setattr(sequences[place], name, value)
    return run_sequences(engine, sequences)


@pytest.mark.parametrize("place", [0, 3])
def test_sampling_that_is_repeated_counts_no_token_twice(fp32: Checkpoint, engine: Engine, place: int) -> None:
    requests = requests_of(fp32, 4)
    bad_words = _BrokenBadWords(fp32.tokenizer.vocabulary, "completing", times=2)
    run = _run_one_broken(engine, requests, place, bad_words=bad_words)
    assert run.results == completions(engine, requests)
    assert run.errors == 2


@pytest.mark.parametrize(("broken", "place"), [("completing", 1), ("append", 1), ("text", 0), ("text", 2), ("text", 3)])
def test_a_sequence_whose_text_or_bad_words_fail_costs_no_other_its_result(
    fp32: Checkpoint, engine: Engine, broken: str, place: int
) -> None:
    requests = requests_of(fp32, 4)
    if broken == "text":
        stop_checker = _BrokenStopChecker(min_tokens=8, max_tokens=8, stop_words=[], end_tokens=[])
        run = _run_one_broken(engine, requests, place, stop_checker=stop_checker)
    else:
        bad_words = _BrokenBadWords(fp32.tokenizer.vocabulary, broken, times=100)
        run = _run_one_broken(engine, requests, place, bad_words=bad_words)
    _assert_only_fails(run, place, completions(engine, requests))
