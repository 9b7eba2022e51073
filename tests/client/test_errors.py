"""Status codes and messages, in the words of Triton 2.51 and gRPC, become the right exception."""

from __future__ import annotations

import pytest
from llama_engine.errors import RequestError
from triton_llama import (
    AccessDeniedError,
    LlamaConnectionError,
    LlamaTimeoutError,
    ModelNotFoundError,
    OverloadedError,
    RejectedInputError,
    ServerError,
    TritonLlamaError,
)
from triton_llama.address import ServerAddress
from triton_llama.errors import (
    MODEL_ERRORS,
    QUEUE_FULL,
    DecoupledModelError,
    from_grpc_status,
    from_http_response,
    from_stream_error,
    is_interruption,
)

SERVER = ServerAddress.parse("127.0.0.1:8001", "grpc")
UNLOADED = "Request for unknown model: 'x' has no available versions"


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (400, b'{"error":"top_p is 2, must lie in (0, 1]"}', RejectedInputError, "top_p is 2, must lie in (0, 1]"),
        (400, b'{"error":"INTERNAL: decoding failed"}', ServerError, "decoding failed"),
        (503, b'{"error":"Exceeds maximum queue size"}', OverloadedError, "Exceeds maximum queue size"),
        (404, b'{"error":"Request for unknown model: \'x\' is not found"}', ModelNotFoundError, "unknown model: 'x'"),
        (404, f'{{"error":"{UNLOADED}"}}'.encode(), OverloadedError, "stopping"),
        (503, b'{"error":"Request for unknown model: \'x\' version 1 is not at ready state"}', OverloadedError, "'x'"),
        (501, b'{"error":"doesn\'t support models with decoupled policy"}', DecoupledModelError, "decoupled"),
        (501, b'{"error":"not implemented"}', ServerError, "not implemented"),
        (404, b"<html>\n<h1>Not Found</h1></html>", ServerError, "HTTP status 404: <html> <h1>Not Found</h1></html>"),
        (401, b"", AccessDeniedError, "HTTP status 401"),
        (504, b"gateway timeout", LlamaTimeoutError, "HTTP status 504: gateway timeout"),
        (418, b'{"detail": "teapot"}', ServerError, "HTTP status 418"),
    ],
)
def test_an_http_status_becomes_its_exception(
    status: int, body: bytes, kind: type[TritonLlamaError], message: str
) -> None:
    error = from_http_response(status, body)
    assert type(error) is kind
    assert message in str(error)
    assert "\n" not in str(error)


NO_CONNECTION = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "


@pytest.mark.parametrize(
    ("status", "message", "kind", "outcome"),
    [
        ("INVALID_ARGUMENT", "text_input must not be empty", RejectedInputError, ""),
        ("INVALID_ARGUMENT", "INVALID_ARG: text_input is 'the server is stopping'; no", RejectedInputError, ""),
        ("UNAVAILABLE", "Exceeds maximum queue size", OverloadedError, "full"),
        ("UNAVAILABLE", "QUEUE_FULL: too many guides wait to be compiled", OverloadedError, "full"),
        ("UNAVAILABLE", "UNAVAILABLE: the request's time was up before it got a slot", OverloadedError, ""),
        ("UNAVAILABLE", "STOPPING: the server is stopping", OverloadedError, "interrupted"),
        ("UNAVAILABLE", "Server is stopping, scheduler for model has stopped", OverloadedError, "interrupted"),
        ("UNAVAILABLE", "Received http2 header with status: 429", OverloadedError, "interrupted"),
        ("UNAVAILABLE", "Received http2 header with status: 503", OverloadedError, "interrupted"),
        ("UNAVAILABLE", "Received http2 header with status: 502", LlamaConnectionError, "interrupted"),
        ("UNAVAILABLE", f"{NO_CONNECTION}Connection refused", LlamaConnectionError, "interrupted"),
        ("UNAVAILABLE", f"{NO_CONNECTION}connection attempt timed out", LlamaTimeoutError, "interrupted"),
        ("NOT_FOUND", UNLOADED, OverloadedError, "interrupted"),
        ("NOT_FOUND", "Request for unknown model: 'x' is not found", ModelNotFoundError, ""),
        ("INTERNAL", "Stub process 'llama_0_0' is not healthy.", ServerError, "interrupted"),
        ("INTERNAL", "Internal error from Core", LlamaConnectionError, "interrupted"),
        ("INTERNAL", "Received RST_STREAM with error code 2", LlamaConnectionError, "interrupted"),
        ("INTERNAL", "INTERNAL: decoding failed; the server's log has the reason", ServerError, ""),
        ("UNAUTHENTICATED", "no key", AccessDeniedError, ""),
        ("UNIMPLEMENTED", "", ServerError, ""),
        ("UNIMPLEMENTED", "doesn't support models with decoupled transaction policy", DecoupledModelError, ""),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", LlamaTimeoutError, ""),
        ("CANCELLED", "Channel closed!", LlamaConnectionError, "interrupted"),
    ],
)
def test_a_grpc_status_becomes_its_exception(
    status: str, message: str, kind: type[TritonLlamaError], outcome: str
) -> None:
    error = from_grpc_status(status, message, SERVER, 5.0)
    assert type(error) is kind
    assert is_interruption(error) == (outcome == "interrupted")
    assert (error.code == QUEUE_FULL) == (outcome == "full")


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize(
    ("message", "kind", "interrupted"),
    [
        (UNLOADED, OverloadedError, True),
        ("Request for unknown model: 'x' is not found", ModelNotFoundError, False),
    ],
)
def test_a_streams_message_becomes_its_exception(
    message: str, kind: type[TritonLlamaError], interrupted: bool, started: bool
) -> None:
    error = from_stream_error(message, started=started)
    assert type(error) is kind
    assert is_interruption(error) == interrupted


def test_the_codes_are_the_models() -> None:
    kinds = [RequestError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    assert {kind.code for kind in kinds} == set(MODEL_ERRORS)
