"""What the two gRPC transports share: tensors for tritonclient, and the channel's options."""

from __future__ import annotations

from collections.abc import Mapping

from tritonclient.grpc import InferInput, InferRequestedOutput

from triton_llama.errors import ServerError
from triton_llama.tensors import OUTPUT_NAMES, PreparedRequest

_LARGEST_MESSAGE = 2**31 - 1


def infer_inputs(request: PreparedRequest) -> list[InferInput]:
    """Encode the inputs."""
    inputs = []
    for tensor in request.tensors:
        wire = InferInput(tensor.name, list(tensor.values.shape), tensor.datatype)
        wire.set_data_from_numpy(tensor.values)
        inputs.append(wire)
    return inputs


def requested_outputs() -> list[InferRequestedOutput]:
    """All outputs of the contract."""
    return [InferRequestedOutput(name) for name in OUTPUT_NAMES]


def channel_options(connect_timeout: float) -> list[tuple[str, int]]:
    """Options of the channel; `connect_timeout` in seconds.

    gRPC waits longer after each failed attempt to connect, up to two minutes by default, during which every request
    fails at once; two seconds let a client find a restarted server again.
    """
    return [
        ("grpc.max_send_message_length", _LARGEST_MESSAGE),
        ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
        # Its name says otherwise, but this is the time one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", max(1, int(connect_timeout * 1000))),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2000),
        # As over HTTP, the address given is the address used.
        ("grpc.enable_http_proxy", 0),
    ]


def metadata_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """HTTP headers as gRPC metadata, whose names must be in lower case."""
    return {name.lower(): value for name, value in headers.items()}


def read_object(answer: object) -> Mapping[str, object]:
    """Check that an answer which tritonclient turned into JSON is an object."""
    if not isinstance(answer, dict):
        raise ServerError(f"the answer is {str(answer)[:80]}, must be an object")
    return answer
