"""Requests with a text that is longer than what arrives, which no client library sends, over every binary wire."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import grpc
from llama_engine.triton.batch_strategy.build import is_built
from server.clients import BAD, DTYPES, Inputs, Refusal
from server.servers import HTTP, TIMEOUT_S
from triton_local.server import LocalTriton
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

ISOLATED = is_built()
"""Whether Triton loads the library that keeps them from failing their batch."""

Tensors = dict[str, tuple[int, bytes]]
"""By name: elements of the one row, and their bytes."""

Send = Callable[[LocalTriton, str, Tensors], Refusal | None]
"""Asks a model over a wire; returns the error."""


def too_long(inputs: Inputs, name: str, length: int, arrived: bytes) -> Tensors:
    """Return a row of inputs whose last element of one input has a length and less than that behind it."""
    lists = {key: value if isinstance(value, list) else [value] for key, value in inputs.items()}
    tensors = {key: (len(row), b"".join(packed(item, DTYPES[key]) for item in row)) for key, row in lists.items()}
    before = b"".join(packed(item, "BYTES") for item in lists[name][:-1])
    return {**tensors, name: (len(lists[name]), before + struct.pack("<I", length) + arrived)}


def packed(value: Any, datatype: str) -> bytes:  # noqa: ANN401 - of a tensor
    """Return a value as the binary extension has it."""
    if datatype == "BYTES":
        text: bytes = value.encode()
        return struct.pack("<I", len(text)) + text
    return struct.pack({"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}[datatype], value)


def over_http(server: LocalTriton, model: str, tensors: Tensors) -> Refusal | None:
    """Ask /infer with the binary extension; return the error."""
    head = {
        "inputs": [
            {
                "name": name,
                "datatype": DTYPES[name],
                "shape": [1, elements],
                "parameters": {"binary_data_size": len(content)},
            }
            for name, (elements, content) in tensors.items()
        ]
    }
    written = json.dumps(head).encode()
    answered = HTTP.post(
        f"http://{server.http_url}/v2/models/{model}/infer",
        content=b"".join([written, *(content for _, content in tensors.values())]),
        headers={"Inference-Header-Content-Length": str(len(written))},
    )
    if answered.is_success:
        return None
    return Refusal(BAD if answered.status_code == 400 else str(answered.status_code), answered.json()["error"])


def over_grpc(server: LocalTriton, model: str, tensors: Tensors) -> Refusal | None:
    """Ask over gRPC; return the error."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        try:
            GRPCInferenceServiceStub(channel).ModelInfer(_message(model, tensors), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            bad = error.code() is grpc.StatusCode.INVALID_ARGUMENT
            return Refusal(BAD if bad else error.code().name, str(error.details()))
    return None


def over_stream(server: LocalTriton, model: str, tensors: Tensors) -> Refusal | None:
    """Ask over a gRPC stream; return the error, whose kind a stream does not have."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        messages = iter([_message(model, tensors)])
        answers = [*GRPCInferenceServiceStub(channel).ModelStreamInfer(messages, timeout=TIMEOUT_S)]
    errors = [answer.error_message for answer in answers if answer.error_message]
    return Refusal(BAD, errors[0]) if errors else None


def _message(model: str, tensors: Tensors) -> service_pb2.ModelInferRequest:
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, (elements, content) in tensors.items():
        request.inputs.add(name=name, datatype=DTYPES[name]).shape.extend([1, elements])
        request.raw_input_contents.append(content)
    return request
