"""A client that leaves frees its slot: the request is cancelled in Triton."""

from __future__ import annotations

import pytest
from frontend.endpoints import WITHOUT_ITS_BODY, Endpoint, endpoint
from frontend.fake_triton import FakeTriton

CHAT: tuple[str, dict[str, object]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
COMPLETION: tuple[str, dict[str, object]] = ("/v1/completions", {"prompt": ["a", "b"]})
RESPONSE: tuple[str, dict[str, object]] = ("/v1/responses", {"input": "a"})
MESSAGE: tuple[str, dict[str, object]] = ("/v1/messages", {**CHAT[1], "max_tokens": 64})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), [CHAT, COMPLETION, RESPONSE, MESSAGE])
def test_a_request_is_cancelled_when_its_client_leaves_before_any_text(
    served: Endpoint, triton: FakeTriton, path: str, fields: dict[str, object], stream: bool
) -> None:
    triton.hold_after = 0
    prompts = 2 if path == COMPLETION[0] else 1
    with served.begin_request(path, **fields, stream=stream):
        triton.wait_for(lambda fake: fake.running == prompts)
    triton.wait_for(lambda fake: len(fake.cancelled) == prompts and not fake.running)


@pytest.mark.parametrize(("path", "fields"), [CHAT, COMPLETION, RESPONSE, MESSAGE])
def test_a_stream_is_cancelled_when_its_client_leaves_within_the_text(
    served: Endpoint, triton: FakeTriton, path: str, fields: dict[str, object]
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
        served.begin_request(COMPLETION[0], prompt="a", stream=True),
    ):
        triton.wait_for(lambda _: line in served.http.get("/metrics").text)


def test_an_aborted_body_is_no_request(served: Endpoint, triton: FakeTriton) -> None:
    served.begin(WITHOUT_ITS_BODY).close()
    assert served.complete().status_code == 200
    assert len(triton.requests) == 1
