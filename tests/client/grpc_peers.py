"""gRPC servers for the client to meet: Triton's service, with whatever behaviour a test gives it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
from client.peers import HOST
from tritonclient.grpc.service_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server
from tritonclient.utils import serialize_byte_tensor

Responses = Iterator[ModelStreamInferResponse]
Behaviour = Callable[[ModelInferRequest, grpc.ServicerContext], Responses]


class Service(GRPCInferenceServiceServicer):  # type: ignore[misc] # generated, without types
    """Answers each request as the test says."""

    def __init__(self, behave: Behaviour) -> None:
        self._behave = behave

    def ModelStreamInfer(  # noqa: N802 - Triton's name
        self, request_iterator: Iterator[ModelInferRequest], context: grpc.ServicerContext
    ) -> Responses:
        (request,) = request_iterator
        yield from self._behave(request, context)

    def ModelInfer(  # noqa: N802 - Triton's name
        self, request: ModelInferRequest, context: grpc.ServicerContext
    ) -> ModelInferResponse:
        (response,) = self._behave(request, context)
        return response.infer_response


@contextmanager
def grpc_server(behave: Behaviour) -> Iterator[int]:
    service = grpc.server(ThreadPoolExecutor(16))
    add_GRPCInferenceServiceServicer_to_server(Service(behave), service)
    port = service.add_insecure_port(f"{HOST}:0")
    service.start()
    try:
        yield port
    finally:
        service.stop(None).wait()


def strings(text: str) -> bytes:
    return bytes(serialize_byte_tensor(np.array([text.encode()], dtype=np.object_)).item())


def response(text: str, reason: str = "", *, tokens: int = 1) -> ModelStreamInferResponse:
    message = ModelStreamInferResponse()
    answer = message.infer_response
    for name, datatype, raw in (
        ("text_output", "BYTES", strings(text)),
        ("finish_reason", "BYTES", strings(reason)),
        ("num_input_tokens", "INT32", np.int32(3).tobytes()),
        ("num_output_tokens", "INT32", np.int32(tokens).tobytes()),
    ):
        answer.outputs.add(name=name, datatype=datatype, shape=[1, 1])
        answer.raw_output_contents.append(raw)
    return message


def saying(*responses: ModelStreamInferResponse) -> Behaviour:
    return lambda request, context: iter(responses)
