"""Streams over gRPC from servers that refuse, fail, babble or never end: a real gRPC server, both clients."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest
from triton_llama import Completion, OverloadedError, RejectedInputError, ServerError, TritonLlamaError
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse
from unit.grpc_peers import Responses, grpc_server, response, saying, strings
from unit.streaming import Stream, both_clients

LAST = response(" é", "stop", prompt_tokens=3, tokens=2)


@both_clients
def test_pieces_come_as_they_were_sent_and_add_up_to_a_completion(stream: Stream) -> None:
    with grpc_server(saying(response("a"), response("🙂"), LAST)) as port:
        streamed = stream(port, "grpc")
    assert streamed.texts == ["a", "🙂", " é"]
    assert isinstance(streamed.outcome, Completion)
    assert streamed.outcome.text == "a🙂 é"
    assert (streamed.outcome.finish_reason, streamed.outcome.num_input_tokens) == ("stop", 3)
    assert streamed.outcome.num_output_tokens == 4


@both_clients
def test_a_piece_is_handed_out_before_the_next_one_is_sent(stream: Stream) -> None:
    has_come = threading.Semaphore(0)

    def wait_for_the_reader(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        for answer in (response("a"), response("b"), LAST):
            yield answer
            assert has_come.acquire(timeout=20)

    with grpc_server(wait_for_the_reader) as port:
        streamed = stream(port, "grpc", on_piece=lambda piece: has_come.release())
    assert streamed.texts == ["a", "b", " é"]


@both_clients
def test_the_request_asks_for_pieces_and_for_errors_with_a_status(stream: Stream) -> None:
    seen: list[tuple[ModelInferRequest, dict[str, str]]] = []

    def look(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        seen.append((request, dict(context.invocation_metadata())))
        yield LAST

    with grpc_server(look) as port:
        outcome = stream(port, "grpc").outcome
    ((request, metadata),) = seen
    assert isinstance(outcome, Completion)
    assert (request.model_name, request.id) == ("llama", outcome.request_id)
    raw = {tensor.name: raw for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)}
    assert raw["stream"] == b"\x01"
    assert raw["text_input"] == strings("def")
    assert int.from_bytes(raw["seed"], "little") == outcome.seed
    assert metadata["triton_grpc_error"] == "true"


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "top_p is 2, must lie in (0, 1]", RejectedInputError),
        (grpc.StatusCode.UNAVAILABLE, "the server is on its way out", OverloadedError),
        (grpc.StatusCode.INTERNAL, "decoding failed", ServerError),
        (grpc.StatusCode.CANCELLED, "the request was cancelled", ServerError),
    ],
)
@pytest.mark.parametrize("before", [0, 2])
@both_clients
def test_an_error_with_a_status_is_the_error_of_that_status(
    stream: Stream, before: int, status: grpc.StatusCode, message: str, kind: type[TritonLlamaError]
) -> None:
    def fail(request: ModelInferRequest, context: grpc.ServicerContext) -> Responses:
        yield from [response("a")] * before
        context.abort(status, message)

    with grpc_server(fail) as port:
        streamed = stream(port, "grpc")
    assert streamed.texts == ["a"] * before
    assert type(streamed.outcome) is kind
    assert str(streamed.outcome) == message


@pytest.mark.parametrize(
    ("before", "message", "kind"),
    [
        (0, "top_p is 2, must lie in (0, 1]", RejectedInputError),
        (0, "Exceeds maximum queue size", OverloadedError),
        (1, "the step failed", ServerError),
        (1, "the server is stopping", OverloadedError),
    ],
)
@both_clients
def test_an_error_that_is_only_a_message_is_told_by_its_words(
    stream: Stream, before: int, message: str, kind: type[TritonLlamaError]
) -> None:
    with grpc_server(saying(*[response("a")] * before, ModelStreamInferResponse(error_message=message))) as port:
        streamed = stream(port, "grpc")
    assert len(streamed.pieces) == before
    assert type(streamed.outcome) is kind


@both_clients
def test_a_stream_that_ends_without_a_finish_reason_is_not_taken_for_whole(stream: Stream) -> None:
    with grpc_server(saying(response("a"))) as port:
        streamed = stream(port, "grpc")
    assert streamed.texts == ["a"]
    assert isinstance(streamed.outcome, ServerError)


def broken(change: Callable[[ModelStreamInferResponse], object]) -> ModelStreamInferResponse:
    answer = response("x")
    change(answer)
    return answer


@pytest.mark.parametrize(
    "garbage",
    [
        ModelStreamInferResponse(),
        broken(lambda answer: answer.infer_response.outputs.pop()),
        broken(lambda answer: answer.infer_response.raw_output_contents.pop()),
        broken(lambda answer: answer.infer_response.outputs[0].shape.append(2)),
        broken(lambda answer: answer.infer_response.raw_output_contents.__setitem__(0, b"\x09\x00\x00\x00x")),
        broken(lambda answer: answer.infer_response.raw_output_contents.__setitem__(0, b"\x01\x00\x00\x00\xff")),
        broken(lambda answer: answer.infer_response.raw_output_contents.__setitem__(2, b"x")),
    ],
    ids=["empty", "no output", "no content", "shape", "length", "not UTF-8", "count"],
)
@both_clients
def test_garbage_is_a_server_error_after_the_pieces_before_it(
    stream: Stream, garbage: ModelStreamInferResponse
) -> None:
    with grpc_server(saying(response("a"), garbage)) as port:
        streamed = stream(port, "grpc")
    assert streamed.texts == ["a"]
    assert type(streamed.outcome) is ServerError
