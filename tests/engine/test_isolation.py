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
from llama_engine.engine.engine import Engine
from llama_engine.engine.events import Completion
from llama_engine.engine.failures import Isolation
from llama_engine.errors import GenerationError
from llama_engine.model.loader import LoadedModel
from llama_engine.request.generation_request import GenerationRequest
from llama_engine.sampling.state import SamplingState

FAILED = "decoding failed; the server's log has the reason"
EXHAUSTED, EXHAUSTED_ALONE = torch.OutOfMemoryError, "the device's memory was exhausted by this request alone"
LONG = 100
"""Prompt tokens of the request at fault, longer than the others' prompts: its passes can be told apart."""

Fails = Callable[[ForwardPass], bool]


def _with_a_long_one(checkpoint: LoadedModel, place: int) -> list[GenerationRequest]:
    requests = requests_of(checkpoint, 4)
    requests[place] = request_of(checkpoint, place, LONG)
    return requests


def _run(
    checkpoint: LoadedModel,
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

    def fail(forward: ForwardPass) -> None:
        if fails(forward):
            raise error("CUDA error: a secret of the machine")

    return watching(fail)


def _assert_only_fails(faulty: Run, place: int, expected: list[Completion], message: str = FAILED) -> None:
    results = faulty.results
    assert isinstance(results[place], GenerationError)
    assert str(results[place]) == message
    assert [*results[:place], *results[place + 1 :]] == [*expected[:place], *expected[place + 1 :]]


@pytest.mark.parametrize(
    ("error", "fails", "place", "message"),
    [
        (RuntimeError, lambda forward: forward.longest == LONG, 0, FAILED),
        (EXHAUSTED, lambda forward: forward.tokens >= LONG, 3, f"{EXHAUSTED_ALONE}, of {LONG} prompt tokens"),
        (RuntimeError, lambda forward: forward.decodes and forward.last_position >= LONG, 2, FAILED),
        (RuntimeError, lambda forward: forward.decodes and forward.last_position >= LONG + 3, 0, FAILED),
    ],
    ids=["prefill", "prefill exhausts the memory", "first decode step", "later decode step"],
)
def test_a_sequence_that_always_fails_costs_no_other_its_result(
    int8: LoadedModel,
    error: type[Exception],
    fails: Fails,
    place: int,
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty, expected = _run(int8, engine_of(int8, 4), _with_a_long_one(int8, place), _failing(fails, error))
    _assert_only_fails(faulty, place, expected, message)
    # Passes over four sequences, two and one.
    assert faulty.errors == 3
    assert "a secret of the machine" in caplog.text


@pytest.mark.parametrize(
    ("error", "exhausted"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        # cuBLAS's and cuDNN's errors, as PyTorch raises them.
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_any_librarys_lack_of_memory_is_recognized(error: Exception, exhausted: bool) -> None:
    assert Isolation().record(error, "a pass") == exhausted


@pytest.mark.parametrize("name", ["copy", "set"])
def test_every_sequence_has_a_result_when_changing_the_slots_fails_too(fp32: LoadedModel, name: str) -> None:
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
    ("place", "part", "method", "good_calls", "failures"),
    [
        # Computing the banned tokens fails twice: sampling is repeated, and succeeds.
        (0, "bad_words", "completing", 0, 2),
        (3, "bad_words", "completing", 0, 100),
        (0, "bad_words", "append", 0, 100),
        (3, "output", "add", 3, 100),
    ],
)
def test_a_sequence_whose_text_or_bad_words_fail_costs_no_other_its_result(
    fp32: LoadedModel, place: int, part: str, method: str, good_calls: int, failures: int
) -> None:
    engine = engine_of(fp32, 4)
    requests = [replace(request, bad_words=(b"\x00never",)) for request in requests_of(fp32, 4)]
    sequences = [engine.builder.build(request) for request in requests]
    effects = [*repeat(DEFAULT, good_calls), *repeat(RuntimeError("no text"), failures), *repeat(DEFAULT, 100)]
    sequence = sequences[place]
    broken = sequence.output if part == "output" else getattr(sequence.processor, f"_{part}")
    with patch.object(broken, method, wraps=getattr(broken, method), side_effect=effects):
        faulty = run(engine, sequences)
    expected = alone(fp32, requests)
    if failures == 2:
        assert faulty.results == expected
        assert faulty.errors == 2
    else:
        _assert_only_fails(faulty, place, expected)
