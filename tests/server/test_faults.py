"""Faults inside the server fail the sequences concerned with a clear error, and no other ones."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from server.clients import SECRET, TENSOR_WIRES, Answer, Refusal, ask, assert_clean, at_once, generate
from server.metrics import Metrics
from server.streams import STREAM_WIRES, Call, GrpcStream
from triton_local.server import LocalTriton

DECODING = "decoding failed; the server's log "
ERRORS = "llama_step_errors_total"
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
def alone(faulty: LocalTriton) -> list[str]:
    """What each neighbour gets by itself."""
    return [ask(faulty, generate, **one).text for one in NEIGHBOURS]


@pytest.fixture
def metrics(faulty: LocalTriton) -> Metrics:
    return Metrics(faulty)


def _faulty(fault: str, **inputs: object) -> dict[str, object]:
    return {"text_input": f"Here is a fault {fault} in the middle", "max_tokens": 12, "min_tokens": 12} | inputs


def _text(faulty: LocalTriton, streams: bool, request: dict[str, object]) -> str:
    return STREAM_WIRES[1](faulty, request).whole.text if streams else ask(faulty, generate, **request).text


def _neighbours(faulty: LocalTriton) -> list[partial[str]]:
    return [partial(_text, faulty, index % 2 == 0, one) for index, one in enumerate(NEIGHBOURS)]


def _error(faulty: LocalTriton, streams: bool, request: dict[str, object]) -> str:
    if streams:
        error = STREAM_WIRES[0](faulty, request).error
        assert error is not None, f"{request} was answered"
        return error
    # /generate answers 400 whatever the model's error is.
    refusal = generate(faulty, request)
    assert isinstance(refusal, Refusal), f"{request} was answered: {refusal}"
    return refusal.message


def _beside(faulty: LocalTriton, alone: Sequence[str], requests: Sequence[dict[str, object]]) -> list[str]:
    """Send faulty requests, every other one a stream, among neighbours, who must get their texts; return the errors."""
    jobs = [partial(_error, faulty, index % 2 == 1, request) for index, request in enumerate(requests)]
    others = _neighbours(faulty)
    results = at_once([*others[:3], *jobs, *others[3:]])
    assert results[:3] + results[3 + len(jobs) :] == alone
    errors = results[3 : 3 + len(jobs)]
    for error in errors:
        assert_clean(error)
    return errors


@pytest.mark.parametrize(
    ("fault", "inputs"),
    [
        ("prefill", {}),
        ("step", {}),
        ("append", {}),
        ("chunk", {"text_input": "word " * 90 + "fault chunk" + " word" * 90}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_fails_its_own_sequence(
    faulty: LocalTriton, metrics: Metrics, alone: list[str], fault: str, inputs: dict[str, object]
) -> None:
    errors = _beside(faulty, alone, [_faulty(fault, seed=seed, **inputs) for seed in range(3)])
    assert all(error.startswith(DECODING) for error in errors), errors
    metrics.wait_for(3, "llama_requests_total", finish_reason="error")
    metrics.wait_for(len(NEIGHBOURS), "llama_requests_total", finish_reason="length")
    assert metrics.grown(ERRORS) >= 3
    assert SECRET in faulty.log_text(), "the log has the cause"


def test_a_sequence_with_logits_that_are_not_finite_fails(faulty: LocalTriton, alone: list[str]) -> None:
    errors = _beside(faulty, alone, [_faulty("nan") for _ in range(3)])
    assert set(errors) == {"the model's logits for this request were not finite"}


def test_a_request_that_fails_in_parsing_is_refused(faulty: LocalTriton, alone: list[str]) -> None:
    errors = _beside(faulty, alone, [_faulty("parse") for _ in range(3)])
    assert set(errors) == {"the request could not be read; the server's log has the reason"}


@pytest.mark.parametrize("fault", ["hiccup", "head"])
def test_a_fault_that_does_not_recur_fails_no_sequence(
    faulty: LocalTriton, metrics: Metrics, alone: list[str], fault: str
) -> None:
    # Long enough to run until all neighbours have come: a fault of a sequence that runs alone is its own.
    with Call(faulty, _faulty(fault, seed=5, min_tokens=450, max_tokens=450)) as call:
        metrics.wait(lambda now: now.now("llama_slots_in_use") == 1, "it runs")
        assert at_once(_neighbours(faulty)) == alone
        assert isinstance(call.outcome(), Answer)
    metrics.wait(lambda now: now.grown(ERRORS) >= 1, "the fault is counted")
    assert metrics.grown("llama_requests_total", finish_reason="error") == 0


def test_prompts_that_together_exceed_memory_are_prefilled_in_smaller_groups(
    faulty: LocalTriton, metrics: Metrics, alone: list[str]
) -> None:
    """Eight rows of one request are admitted together; there is memory for three of their prompts."""
    requests = [
        _faulty("memory", text_input=f"There is a fault memory in {index} of these prompts", seed=index)
        for index in range(8)
    ]
    one_by_one = [ask(faulty, generate, **one) for one in requests]
    assert metrics.grown(ERRORS) == 0
    with ThreadPoolExecutor(1) as pool, GrpcStream(faulty) as stream:
        texts = pool.submit(at_once, _neighbours(faulty))
        stream.ask({name: [[one[name]] for one in requests] for name in requests[0]})
        response = stream.next()
        assert (response.error, response.rows) == (None, one_by_one)
        assert texts.result() == alone
    metrics.wait(lambda now: now.grown(ERRORS) >= 1, "a pass was too large")
    assert metrics.grown("llama_requests_total", finish_reason="error") == 0


def test_a_prompt_that_alone_exceeds_memory_fails(faulty: LocalTriton, alone: list[str]) -> None:
    large = "There is a fault memory" + " here" * 80
    for error in _beside(faulty, alone, [_faulty("", text_input=large) for _ in range(2)]):
        assert "the device's memory was exhausted by this request alone, of " in error
        assert " prompt tokens" in error


def test_a_request_whose_cancellation_state_is_unknown_is_answered(faulty: LocalTriton, alone: list[str]) -> None:
    assert all(at_once([partial(_text, faulty, index % 2 == 0, _faulty("question")) for index in range(3)]))
    _beside(faulty, alone, [])


def test_a_fault_in_making_a_chunk_fails_its_own_stream(faulty: LocalTriton, alone: list[str]) -> None:
    jobs = [partial(STREAM_WIRES[index % 3], faulty, _faulty("piece", seed=index)) for index in range(3)]
    with ThreadPoolExecutor(1) as pool:
        texts = pool.submit(at_once, _neighbours(faulty))
        errors = [streamed.error for streamed in at_once(jobs)]
    assert all(error is not None and DECODING in error for error in errors), errors
    assert texts.result() == alone


@pytest.mark.parametrize("fault", ["report", "count"])
def test_after_a_fault_of_the_scheduler_every_request_gets_a_text_or_an_error(
    faulty: LocalTriton, metrics: Metrics, alone: list[str], fault: str
) -> None:
    """The fault belongs to no sequence in particular, so all that run may fail."""
    requests = [*NEIGHBOURS, *[_faulty(fault, seed=index) for index in range(3)]]
    results = at_once([partial(STREAM_WIRES[index % 3], faulty, one) for index, one in enumerate(requests)])
    for streamed in results:
        assert streamed.error is None or streamed.error.startswith(DECODING), streamed
    for streamed, text in zip(results, alone, strict=False):
        assert streamed.error is not None or streamed.whole.text == text
    metrics.wait(Metrics.idle, "all slots are free")
    metrics.wait(lambda now: now.grown(ERRORS) >= 1, "the fault is counted")
    _beside(faulty, alone, [])


@pytest.mark.parametrize("fault", ["prefill", "step", "parse"])
def test_an_internal_error_has_an_internal_status(faulty_default: LocalTriton, fault: str) -> None:
    for wire in TENSOR_WIRES:
        refusal = wire(faulty_default, _faulty(fault))
        assert isinstance(refusal, Refusal)
        assert refusal.kind in ("500", "StatusCode.INTERNAL")
        assert_clean(refusal.message)
