"""A client that leaves frees its slot: the request is cancelled in Triton."""

from __future__ import annotations

import pytest
from frontend.endpoints import WITHOUT_ITS_BODY, Endpoint, Json, endpoint
from frontend.fake_triton import FakeTriton

MESSAGES: Json = {"messages": [{"role": "user", "content": "a"}]}
REQUESTS: list[tuple[str, Json, int]] = [
    ("/v1/chat/completions", MESSAGES, 1),
    ("/v1/completions", {"prompt": ["a", "b"]}, 2),
    ("/v1/responses", {"input": "a"}, 1),
    ("/v1/messages", {**MESSAGES, "max_tokens": 64}, 1),
    ("/v1/embeddings", {"input": ["a", "b", "c"]}, 3),
]
STREAM: tuple[str, Json, int] = ("/v1/chat/completions", {**MESSAGES, "stream": True}, 1)


@pytest.mark.parametrize(("path", "fields", "prompts"), [*REQUESTS, STREAM])
def test_a_request_is_cancelled_when_its_client_leaves_before_any_text(
    served: Endpoint, triton: FakeTriton, path: str, fields: Json, prompts: int
) -> None:
    triton.hold_after = 0
    with served.begin_request(path, **fields):
        triton.wait_for(lambda fake: fake.running == prompts)
    triton.wait_for(lambda fake: len(fake.cancelled) == prompts and not fake.running)


@pytest.mark.parametrize(("path", "fields"), [request[:2] for request in REQUESTS[:4]])
def test_a_stream_is_cancelled_when_its_client_leaves_within_the_text(
    served: Endpoint, triton: FakeTriton, path: str, fields: Json
) -> None:
    triton.hold_after = 2
    with served.begin_request(path, **fields, stream=True) as connection:
        received = b""
        while b" Hello" not in received:
            received += connection.recv(65536)
        triton.wait_for(lambda fake: fake.running > 0)
    triton.wait_for(lambda fake: bool(fake.cancelled) and not fake.running)


def test_a_stream_that_its_client_does_not_read_ends_with_its_time(triton: FakeTriton) -> None:
    # More than the buffers of both sockets hold.
    triton.tokens = ["a" * (1 << 20)] * 32
    line = 'llama_openai_requests_total{code="499",route="/v1/completions"} 1.0'
    with (
        endpoint(triton.port, request_timeout=3) as served,
        served.begin_request("/v1/completions", prompt="a", stream=True),
    ):
        triton.wait_for(lambda _: line in served.http.get("/metrics").text)


def test_an_aborted_body_is_no_request(served: Endpoint, triton: FakeTriton) -> None:
    served.begin(WITHOUT_ITS_BODY).close()
    assert served.complete().status_code == 200
    assert len(triton.requests) == 1
