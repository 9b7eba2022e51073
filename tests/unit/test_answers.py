"""When the supervisor takes a model for done that Triton still holds."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from llama_engine.observability.request_counts import RequestCounts
from triton_llama.health import Address
from triton_supervisor.answers import LOOKS, Answers, counts_environment
from triton_supervisor.shared_memory import SHARED_MEMORY, prefix_for, remove_shared_memory
from unit.peers import respond, server

PREFIX = prefix_for(f"test-answers-{os.getpid()}")


@pytest.fixture
def counts() -> Iterator[RequestCounts]:
    yield RequestCounts(counts_environment(PREFIX), "llama")
    remove_shared_memory(PREFIX)


def _looks(answers: Answers, model: str = "llama") -> int:
    """Look until the model is settled; return how often, LOOKS + 1 for never."""
    return next((look for look in range(1, LOOKS + 1) if answers.settled(model)), LOOKS + 1)


def test_a_model_is_settled_after_looks_that_all_find_the_same_and_all_answered(counts: RequestCounts) -> None:
    answers = Answers(PREFIX, None)
    counts.add_accepted(3)
    counts.add_answered(2)
    assert answers.are_due("llama")
    assert _looks(answers) > LOOKS
    counts.add_answered()
    assert not answers.are_due("llama")
    assert [answers.settled("llama") for _ in range(LOOKS - 1)] == [False] * (LOOKS - 1)
    # One more came, and was answered, between two looks.
    counts.add_accepted(1)
    counts.add_answered()
    assert _looks(answers) == LOOKS


def test_every_instance_counts_by_itself(counts: RequestCounts) -> None:
    other = Path(f"{counts_environment(PREFIX)['TRITON_LLAMA_REQUEST_COUNTS']}llama-1")
    other.write_bytes(struct.pack("=QQ", 2, 1))
    counts.add_answered()  # a sum would be even
    assert _looks(Answers(PREFIX, None)) > LOOKS
    other.write_bytes(b"")  # being made
    counts.add_accepted(1)
    assert _looks(Answers(PREFIX, None)) == LOOKS


def test_a_model_without_counts_or_at_its_end_is_not_settled(counts: RequestCounts) -> None:
    answers = Answers(PREFIX, None)
    assert _looks(answers, "llama_unary") > LOOKS
    counts.close()
    assert _looks(answers) > LOOKS
    assert not answers.are_due("llama")


@pytest.mark.parametrize(
    ("name", "number", "looks"), [("llama", 1, LOOKS + 1), ("llama", 0, LOOKS), ("other", 1, LOOKS)]
)
def test_a_request_in_tritons_queue_is_waited_for(counts: RequestCounts, name: str, number: int, looks: int) -> None:
    series = 'nv_inference_pending_request_count{model="%s",version="1"} %d.000000\n'
    # llama's is there in any case.
    page = "".join(series % one for one in {"llama": 0, name: number}.items()).encode()
    with server(respond(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))) as port:
        assert _looks(Answers(PREFIX, Address("127.0.0.1", port))) == looks


_OTHERS = b'nv_inference_pending_request_count{model="other",version="1"} 0\n'


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(_OTHERS), _OTHERS),
    ],
    ids=["closed", "error", "another model's"],
)
def test_a_queue_that_triton_does_not_tell_is_waited_for(counts: RequestCounts, page: bytes) -> None:
    with server(respond(page)) as port:
        assert _looks(Answers(PREFIX, Address("127.0.0.1", port))) > LOOKS


def test_without_a_supervisor_a_model_writes_nothing() -> None:
    before = set(SHARED_MEMORY.glob(f"*-{os.getpid()}"))
    counts = RequestCounts({}, "llama")
    counts.add_accepted(1)
    counts.add_answered()
    counts.close()
    assert set(SHARED_MEMORY.glob(f"*-{os.getpid()}")) == before
