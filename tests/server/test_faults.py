"""Faults inside of the server fail the rows that are concerned, with a clear error, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from server.clients import SECRET, TENSOR_WIRES, Answer, Refusal, ask, assert_clean, at_once, generate
from server.fleet import Fleet
from server.metrics import Metrics
from server.streams import STREAM_WIRES, GrpcStream
from triton_local.server import LocalTriton

DECODING = "decoding failed; the server's log "
ERRORS = "llama_step_errors_total"


@pytest.fixture(scope="module")
def faulty(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("faulty") as server:
        yield server


@pytest.fixture
def faulty_default(fleet: Fleet) -> Iterator[LocalTriton]:
    with fleet.server("faulty_default") as server:
        yield server


NEIGHBOURS: list[dict[str, object]] = [
    {
        "text_input": f"Neighbour {index} says that",
        "max_tokens": 12,
        "min_tokens": 12,
        "temperature": float(index % 2),
        "seed": index,
    }
    for index in range(6)
]


@pytest.fixture(scope="module")
def alone(faulty: LocalTriton) -> list[Answer]:
    """What each neighbour gets when nobody else is there."""
    return [ask(faulty, generate, **one) for one in NEIGHBOURS]


def _faulty(fault: str, **inputs: object) -> dict[str, object]:
    return {"text_input": f"Here is a fault {fault} in the middle", "max_tokens": 12, "min_tokens": 12} | inputs


def _beside(faulty: LocalTriton, alone: Sequence[Answer], requests: Sequence[dict[str, object]]) -> list[str]:
    """Run faulty requests, every other one a stream, among neighbours, who must not notice; return the errors."""
    jobs = [partial(_error, faulty, index % 2 == 1, request) for index, request in enumerate(requests)]
    others = [partial(_text, faulty, index % 2 == 0, one) for index, one in enumerate(NEIGHBOURS)]
    results = at_once([*others[:3], *jobs, *others[3:]])
    assert results[:3] + results[3 + len(jobs) :] == [answer.text for answer in alone]
    errors = results[3 : 3 + len(jobs)]
    for error in errors:
        assert_clean(error)
    return errors


def _error(faulty: LocalTriton, streams: bool, request: dict[str, object]) -> str:
    if streams:
        error = STREAM_WIRES[0](faulty, request).error
        assert error is not None, f"{request} was answered"
        return error
    # Over /generate Triton says 400 whatever the model's error is.
    refusal = generate(faulty, request)
    assert isinstance(refusal, Refusal), f"{request} was answered: {refusal}"
    return refusal.message


def _text(faulty: LocalTriton, streams: bool, request: dict[str, object]) -> str:
    return STREAM_WIRES[1](faulty, request).whole.text if streams else ask(faulty, generate, **request).text


@pytest.mark.parametrize("fault", ["prefill", "step", "transcript"])
def test_a_fault_of_one_row_takes_others_along(faulty: LocalTriton, alone: list[Answer], fault: str) -> None:
    metrics = Metrics(faulty)
    errors = _beside(faulty, alone, [_faulty(fault, seed=seed) for seed in range(3)])
    assert all(error.startswith(DECODING) for error in errors), errors
    metrics.wait_for(3, "llama_requests_total", finish_reason="error")
    metrics.wait_for(len(NEIGHBOURS), "llama_requests_total", finish_reason="length")
    assert metrics.grown(ERRORS) >= 3
    assert SECRET in faulty.log_text(), "the log says why"


def test_a_fault_in_the_middle_of_a_long_prompt_takes_others_along(faulty: LocalTriton, alone: list[Answer]) -> None:
    metrics = Metrics(faulty)
    long = "word " * 90 + "fault chunk" + " word" * 90
    errors = _beside(faulty, alone, [_faulty("", text_input=long) for _ in range(2)])
    assert all(error.startswith(DECODING) for error in errors), errors
    metrics.wait_for(2, "llama_requests_total", finish_reason="error")
    metrics.wait_for(2, ERRORS)


def test_a_row_that_is_not_finite_takes_others_along(faulty: LocalTriton, alone: list[Answer]) -> None:
    errors = _beside(faulty, alone, [_faulty("nan") for _ in range(3)])
    assert set(errors) == {"the model's logits for this request were not finite"}


@pytest.mark.parametrize("fault", ["hiccup", "head"])
def test_a_fault_that_does_not_come_again_fails_somebody(faulty: LocalTriton, alone: list[Answer], fault: str) -> None:
    metrics = Metrics(faulty)
    calm = ask(faulty, generate, **_faulty("", seed=5, text_input="It is calm"))
    _beside(faulty, alone, [])
    together = at_once(
        [partial(_text, faulty, index % 2 == 0, one) for index, one in enumerate(NEIGHBOURS)]
        # It goes on until the last of them has come; what fails alone is its own fault.
        + [partial(_text, faulty, fault == "head", _faulty(fault, seed=5, min_tokens=300, max_tokens=300))]
    )
    assert together[: len(NEIGHBOURS)] == [answer.text for answer in alone]
    assert all(together[len(NEIGHBOURS) :]), together
    metrics.wait(lambda now: now.grown(ERRORS) >= 1, "the fault is counted")
    assert metrics.grown("llama_requests_total", finish_reason="error") == 0
    assert ask(faulty, generate, **_faulty("", seed=5, text_input="It is calm")) == calm


def test_prompts_that_fit_memory_one_by_one_fail_together(faulty: LocalTriton, alone: list[Answer]) -> None:
    """Eight rows of one request, so that they enter together; there is memory for three of their prompts."""
    requests = [
        _faulty("memory", text_input=f"There is a fault memory in {index} of these prompts", seed=index)
        for index in range(8)
    ]
    metrics = Metrics(faulty)
    one_by_one = [ask(faulty, generate, **one) for one in requests]
    assert metrics.grown(ERRORS) == 0
    with ThreadPoolExecutor(1) as pool, GrpcStream(faulty) as stream:
        texts = pool.submit(at_once, [partial(_text, faulty, index < 3, one) for index, one in enumerate(NEIGHBOURS)])
        stream.ask({name: [[one[name]] for one in requests] for name in requests[0]})
        response = stream.next()
        assert response.error is None
        assert response.rows == one_by_one
        assert texts.result() == [answer.text for answer in alone]
    metrics.wait(lambda now: now.grown(ERRORS) >= 1, "a pass was too large")
    assert metrics.grown("llama_requests_total", finish_reason="error") == 0


def test_a_prompt_that_alone_is_too_large_fails_others(faulty: LocalTriton, alone: list[Answer]) -> None:
    large = "There is a fault memory" + " here" * 80
    errors = _beside(faulty, alone, [_faulty("", text_input=large) for _ in range(2)])
    assert all("the device's memory was exhausted by this request alone, of " in error for error in errors), errors
    assert all(" prompt tokens" in error for error in errors)


def test_a_request_that_cannot_be_read_fails_others(faulty: LocalTriton, alone: list[Answer]) -> None:
    errors = _beside(faulty, alone, [_faulty("parse") for _ in range(3)])
    assert set(errors) == {"the request could not be read; the server's log has the reason"}


def test_a_request_that_nobody_can_ask_about_is_not_answered(faulty: LocalTriton, alone: list[Answer]) -> None:
    answers = at_once([partial(_text, faulty, index % 2 == 0, _faulty("question")) for index in range(3)])
    assert all(answers)
    _beside(faulty, alone, [])


def test_a_piece_that_cannot_be_made_takes_others_along(faulty: LocalTriton, alone: list[Answer]) -> None:
    jobs = [partial(STREAM_WIRES[index % 3], faulty, _faulty("piece", seed=index)) for index in range(3)]
    others = [partial(_text, faulty, index % 2 == 0, one) for index, one in enumerate(NEIGHBOURS)]
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(at_once, others)
        errors = [streamed.error for streamed in at_once(jobs)]
    assert all(error is not None and DECODING in error for error in errors), errors
    assert texts.result() == [answer.text for answer in alone]


@pytest.mark.parametrize("fault", ["report", "count"])
def test_a_fault_of_the_scheduler_leaves_somebody_without_an_answer(
    faulty: LocalTriton, alone: list[Answer], fault: str
) -> None:
    """It can't be told whose fault it is: all who run may fail, but everybody hears of it, and the server goes on."""
    metrics = Metrics(faulty)
    jobs = [
        partial(STREAM_WIRES[index % 3], faulty, request)
        for index, request in enumerate([*NEIGHBOURS, *[_faulty(fault, seed=index) for index in range(3)]])
    ]
    results = at_once(jobs)
    for streamed in results:
        assert streamed.error is None or streamed.error.startswith(DECODING), streamed
    for streamed, answer in zip(results, alone, strict=False):
        assert streamed.error is not None or streamed.whole.text == answer.text
    metrics.wait(Metrics.idle, "all slots are given back")
    metrics.wait(lambda now: now.grown(ERRORS) >= 1, "the fault is counted")
    _beside(faulty, alone, [])


def test_a_fault_of_ours_is_the_clients(faulty_default: LocalTriton) -> None:
    for fault in ("prefill", "step", "parse"):
        for wire in TENSOR_WIRES:
            refusal = wire(faulty_default, _faulty(fault))
            assert isinstance(refusal, Refusal)
            assert refusal.kind in ("500", "StatusCode.INTERNAL")
            assert_clean(refusal.message)
