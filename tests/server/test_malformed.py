"""A text that is longer than what arrives passes Triton's own checks, and its Python backend fails the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from server.batches import FULL_SET, in_one_batch
from server.clients import BAD, BINARY_WIRES, Answer, Refusal, ask, at_once, generate, unary_grpc
from server.malformed import ISOLATED, Send, over_grpc, over_http, over_stream, too_long
from server.servers import Statistics
from server.streams import STREAM_WIRES, sse, whole
from triton_local.server import LocalTriton

pytestmark = pytest.mark.skipif(not ISOLATED, reason="no C++ compiler: the library that isolates them isn't built")

Job = Callable[[], Answer | Refusal | None]

GOOD = [{**FULL_SET, "text_input": f"Good {number}", "max_tokens": 4} for number in range(6)]

# What a request's last text is, and its error.
MALFORMED = {
    "text_input has an element of 2097153 bytes, of which 1 arrived": ("text_input", 2**21 + 1, b"X"),
    "text_input has an element of 4 bytes, of which 0 arrived": ("text_input", 4, b""),
    "text_input has an element of 4294967295 bytes, of which 0 arrived": ("text_input", 2**32 - 1, b""),
    # Of several buffers over HTTP.
    "text_input has an element of 300001 bytes, of which 300000 arrived": ("text_input", 300_001, b"x" * 300_000),
    "stop_words has an element of 2 bytes, of which 1 arrived": ("stop_words", 2, b"X"),
}
REFUSALS = [Refusal(BAD, message) for message in MALFORMED]


# One of an input of two texts, whose first one is whole.
BAD_INPUTS = {**FULL_SET, "text_input": "Bad", "stop_words": ["whole", ""]}


@pytest.mark.parametrize("server", ["triton", "batched_int8"], indirect=True)
def test_a_malformed_text_is_refused_by_name_and_none_of_its_batch_fails(server: LocalTriton) -> None:
    alone = [ask(server, generate, **request) for request in GOOD]
    good = [partial(ask, server, wire, **request) for wire in BINARY_WIRES for request in GOOD]
    bad = [
        partial(send, server, "llama", too_long(BAD_INPUTS, *case))
        for send in (over_grpc, over_http)
        for case in MALFORMED.values()
    ]
    jobs: list[Job] = [*good, *bad]
    results, batches = in_one_batch(server, jobs)
    assert results == [*alone * 2, *REFUSALS * 2]
    assert max(batches) >= 4, "the requests were to share batches"


def test_a_malformed_text_on_a_stream_is_refused_by_name_and_none_of_its_batch_fails(streaming: LocalTriton) -> None:
    requests = [{**request, "stream": True} for request in GOOD]
    alone = [whole(streaming, sse, request) for request in requests]
    good = [partial(whole, streaming, wire, request) for wire in STREAM_WIRES for request in requests]
    inputs = {**BAD_INPUTS, "stream": True}
    bad = [partial(over_stream, streaming, "llama", too_long(inputs, *case)) for case in MALFORMED.values()]
    jobs: list[Job] = [*good, *bad]
    statistics = Statistics(streaming)
    for _ in range(3):
        assert at_once(jobs) == [*alone * 2, *REFUSALS]
    assert max(statistics.batches()) >= 2, "the requests were to share batches"


@pytest.mark.parametrize("send", [over_grpc, over_http])
def test_a_malformed_text_fails_none_that_llama_unary_takes_with_it(streaming: LocalTriton, send: Send) -> None:
    alone = [ask(streaming, generate, **request) for request in GOOD]
    good = [partial(ask, streaming, unary_grpc, **request) for request in GOOD]
    bad = [partial(send, streaming, "llama_unary", too_long(BAD_INPUTS, *case)) for case in MALFORMED.values()]
    jobs: list[Job] = [*good, *bad, *good]
    for _ in range(3):
        assert at_once(jobs) == [*alone, *REFUSALS, *alone]


def test_a_client_that_claims_a_malformed_text_is_refused_in_the_model_s_words(triton: LocalTriton) -> None:
    # /generate makes a parameter of an input that the model doesn't have.
    refusal = generate(triton, {"text_input": "x", "max_tokens": 1, "malformed_input": "Traceback"})
    assert isinstance(refusal, Refusal)
    assert refusal.message.startswith("'malformed_input' is no input of this model")
