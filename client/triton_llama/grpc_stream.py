"""Triton's ModelStreamInfer as pure functions: the request, and the piece in each response.

Uses the stubs that tritonclient generates and not its clients, which allow one stream each and mix the responses of
all requests on it. Here each request has a stream of its own, so each can be cancelled, end and fail for itself; gRPC
carries any number of them on one connection. Calls are the transports' business.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import grpc
from tritonclient.grpc import InferResult
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelStreamInferResponse
from tritonclient.utils import InferenceServerException, serialize_byte_tensor

from triton_llama.errors import ServerError
from triton_llama.piece import Piece
from triton_llama.tensors import OUTPUT_NAMES, PreparedRequest, Tensor, read_piece
from triton_llama.translate import NOT_TRITON, from_stream_error, grpc_status

# Asks Triton (from 24.04 on) to end a stream that fails with the error's status; otherwise there is only a message.
_ERRORS_WITH_STATUS = ("triton_grpc_error", "true")


def stream_request(model: str, request: PreparedRequest) -> ModelInferRequest:
    """Encode a request."""
    message = ModelInferRequest(model_name=model, id=request.request_id)
    for tensor in request.tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=list(tensor.values.shape))
        message.raw_input_contents.append(_raw(tensor))
    for name in OUTPUT_NAMES:
        message.outputs.add(name=name)
    return message


def stream_metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the metadata of a stream; names in lower case."""
    return (*headers.items(), _ERRORS_WITH_STATUS)


def read_response(response: ModelStreamInferResponse, *, started: bool) -> Piece:
    """Decode one response; `started`: there was one before it.

    Raises:
        TritonLlamaError: it is an error, or no response of the contract.
    """
    if response.error_message:
        raise from_stream_error(response.error_message, started=started)
    try:
        return read_piece(InferResult(response.infer_response))
    except NOT_TRITON as error:
        raise ServerError(f"the answer is not one of Triton's inference protocol: {error}") from error


@contextmanager
def as_tritonclient_errors() -> Iterator[None]:
    """Turn gRPC's own errors into the one that tritonclient makes of them, for `translate`."""
    try:
        yield
    except grpc.RpcError as error:
        # The class that every call of grpc raises; the stubs of its types leave that out.
        status, details = str(error.code()), error.details()
        raise InferenceServerException(msg=details or status, status=status) from error


def refuses_decoupled(error: InferenceServerException) -> bool:
    """Tell whether this is ModelInfer's refusal of a streaming (decoupled) model; nothing was run."""
    return grpc_status(error) == "UNIMPLEMENTED" and "decoupled" in str(error.message())


def _raw(tensor: Tensor) -> bytes:
    if tensor.datatype != "BYTES":
        return bytes(tensor.values.tobytes())
    (raw,) = serialize_byte_tensor(tensor.values).reshape(1)
    return bytes(raw)
