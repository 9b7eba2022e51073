"""Triton's gRPC protocol without calls: messages for requests, and what responses mean.

On the messages and stubs that tritonclient generates, not on its clients: these allow one stream each and mix the
responses of all requests on it. Here each request has its own call, which ends and can be cancelled for itself; gRPC
carries any number of them on one connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]  # ships no annotations
from tritonclient.grpc import service_pb2 as messages

from triton_llama.completion import Chunk, Completion
from triton_llama.endpoint import Endpoint
from triton_llama.status import ServerStatus, read_status
from triton_llama.tensors import OUTPUT_NAMES, PreparedRequest, decode, read_chunk, read_completion
from triton_llama.translate import from_stream_error

# Makes Triton (from 24.04 on) end a failed stream with the error's status; otherwise there is only a message.
ERRORS_WITH_STATUS = ("triton_grpc_error", "true")
_LARGEST_MESSAGE = 2**31 - 1

GrpcRequest = tuple[str, object]
"""A method's name and its message."""


def read_infer_response(response: messages.ModelInferResponse, request: PreparedRequest) -> Completion:
    """Decode the response of `ModelInfer`; raises as `read_completion` if it violates the contract."""
    return read_completion(_outputs(response), request)


def status_requests(model: str) -> list[GrpcRequest]:
    """Return four questions about server and model; `config_request` is the fifth, if the model is ready."""
    return [
        ("ServerLive", messages.ServerLiveRequest()),
        ("ServerReady", messages.ServerReadyRequest()),
        ("ServerMetadata", messages.ServerMetadataRequest()),
        ("ModelReady", messages.ModelReadyRequest(name=model)),
    ]


def config_request(model: str) -> GrpcRequest:
    """Ask for the configuration of a ready model."""
    return "ModelConfig", messages.ModelConfigRequest(name=model)


def read_status_responses(
    endpoint: Endpoint, model: str, responses: Sequence[Any], config: messages.ModelConfigResponse | None
) -> ServerStatus:
    """Decode the responses to `status_requests`, in their order, and to `config_request`, or None."""
    live, ready, server, _ = responses
    metadata = MessageToDict(server, preserving_proto_field_name=True)
    fields = None if config is None else MessageToDict(config.config, preserving_proto_field_name=True)
    return read_status(endpoint, model, live.live, ready.ready, metadata, fields)


def infer_request(model: str, request: PreparedRequest) -> messages.ModelInferRequest:
    """Encode a request; `ModelInfer` and `ModelStreamInfer` take the same message."""
    message = messages.ModelInferRequest(model_name=model, id=request.request_id)
    for tensor in request.tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.encode())
    for name in OUTPUT_NAMES:
        message.outputs.add(name=name)
    return message


def read_stream_response(response: messages.ModelStreamInferResponse, *, started: bool) -> Chunk:
    """Decode one response of a stream; `started`: there was one before it.

    Raises:
        TritonLlamaError: it is an error, or violates the contract.
    """
    if response.error_message:
        raise from_stream_error(response.error_message, started=started)
    return read_chunk(_outputs(response.infer_response))


def channel_options(connect_timeout: float) -> list[tuple[str, int]]:
    """Return a channel's options; `connect_timeout` in seconds.

    gRPC waits longer after each failed attempt to connect, up to two minutes by default, during which every request
    fails at once; with two seconds a client soon finds a restarted server.
    """
    return [
        ("grpc.max_send_message_length", _LARGEST_MESSAGE),
        ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
        # Despite its name, the time that one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", max(1, int(connect_timeout * 1000))),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # As over HTTP, the address given is the address used.
        ("grpc.enable_http_proxy", 0),
    ]


def metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return HTTP headers as gRPC metadata, whose names must be in lower case."""
    return tuple((name.lower(), value) for name, value in headers.items())


def _outputs(response: messages.ModelInferResponse) -> dict[str, object]:
    # An output without content is missing.
    pairs = zip(response.outputs, response.raw_output_contents, strict=False)
    return {output.name: decode(output.name, output.datatype, output.shape, content) for output, content in pairs}
