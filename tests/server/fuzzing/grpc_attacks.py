"""Hypothesis strategies for the gRPC port: calls with messages of the right type and wrong contents, and wrong bytes.

Methods that change the server are called without the key that they need.
"""

from __future__ import annotations

import struct
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from server.clients import DTYPES, OUTPUTS
from server.fuzzing import values
from server.fuzzing.attacks import CONTROL, GrpcCall, RawBytes
from server.fuzzing.http_attacks import BEGINNINGS
from triton_supervisor.hardening import GRPC_HEADER
from tritonclient.grpc import service_pb2

_SERVICE = "/inference.GRPCInferenceService"
_TELLING = (
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"),
    *("ModelInfer", "NoSuchMethod", ""),
)
_CONTROLS = (
    *("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting", "LogSettings"),
    *("SystemSharedMemoryStatus", "SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"),
    *("CudaSharedMemoryStatus", "CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"),
)
_FIELDS = {"INT32": "int_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents", "BOOL": "bool_contents"}
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

_text = values.prompts | st.text(max_size=20)
_kinds = {
    "bool_param": st.booleans(),
    "int64_param": values.sizes,
    "string_param": _text,
    "double_param": st.floats(),
    "uint64_param": st.integers(0, 2**64 - 1),
}
# Of several the last one counts.
_parameter: SearchStrategy[dict[str, object]] = st.fixed_dictionaries({}, optional=_kinds)
_parameters = st.dictionaries(st.sampled_from(values.PARAMETERS), _parameter, max_size=2)


@st.composite
def _messages(draw: st.DrawFn, model: str, alone: bool) -> bytes:
    """Return a ModelInferRequest, serialized, and sometimes not whole.

    alone: no other one shares its stream. Several always name the model that there is, and are whole: where Triton 2.51
    refuses one for its model or version while it refuses another one for something else, it aborts (a decoupled model's
    responses and those of no model are written to the stream without knowing of each other).
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    raw = draw(st.booleans())
    for name, value in draw(values.inputs).items():
        tensor = request.inputs.add(name=name, datatype=DTYPES.get(name, "INT32"))
        data = value if isinstance(value, list) else [value]
        tensor.shape.extend([1, len(data)])
        if raw:
            request.raw_input_contents.append(draw(values.packed_row(data, tensor.datatype)))
        else:
            _fill(tensor.contents, tensor.datatype, data)
        if draw(values.one_in(12)):
            tensor.name = draw(values.names | _text)
            tensor.datatype = draw(st.sampled_from([*values.DATATYPES, "", "x"]))
            del tensor.shape[:]
            tensor.shape.extend(draw(values.shapes))
            _set(tensor.parameters, draw(_parameters))
            tensor.contents.int64_contents.extend(draw(st.lists(values.sizes, max_size=2)))
    if draw(values.one_in(5)):
        _set(request.parameters, draw(_parameters))
        if alone:
            request.model_name = draw(st.sampled_from([model, model, "", "x", "l" * 3000, "../llama"]))
            request.model_version = draw(st.sampled_from(["", "", "1", "2", "-1", "x", "9" * 40]))
        request.id = draw(_text)
        for name in draw(st.lists(st.sampled_from([*OUTPUTS, "", "text_input"]), max_size=3)):
            _set(request.outputs.add(name=name).parameters, values.without_deadly(draw(_parameters)))
        request.raw_input_contents.extend(draw(st.lists(st.binary(max_size=20), max_size=2)))
    whole: bytes = request.SerializeToString()
    return draw(values.mangled(whole)) if alone else whole


def _fill(contents: Any, datatype: str, data: list[object]) -> None:  # noqa: ANN401 - tritonclient is not annotated
    """Put values into the field of their type; what the field can't hold, as text into the one for bytes."""
    try:
        if datatype in _FIELDS:
            getattr(contents, _FIELDS[datatype]).extend(data)
            return
    except (TypeError, ValueError, OverflowError):
        contents.Clear()
    contents.bytes_contents.extend(values.as_bytes(item) for item in data)


def _set(parameters: Any, given: dict[str, dict[str, object]]) -> None:  # noqa: ANN401 - as above
    for name, value in given.items():
        parameters[name].CopyFrom(service_pb2.InferParameter(**value))


def _stream(*messages: bytes) -> GrpcCall:
    return GrpcCall("ModelStreamInfer", f"{_SERVICE}/ModelStreamInfer", messages, streams=True)


def _inferring(unary: str) -> SearchStrategy[GrpcCall]:
    return _messages(unary, alone=True).map(
        lambda message: GrpcCall("ModelInfer", f"{_SERVICE}/ModelInfer", (message,))
    )


_streaming = st.one_of(
    st.just(_stream()),
    _messages("llama", alone=True).map(_stream),
    st.lists(_messages("llama", alone=False), min_size=2, max_size=3).map(lambda messages: _stream(*messages)),
)
# A message without fields, or with the first one a text, as all of these have it; or noise.
_contents = st.binary(max_size=100) | st.sampled_from(["", "llama", "x"]).map(
    lambda name: b"\x0a" + bytes([len(name)]) + name.encode()
)
_telling = st.builds(
    lambda method, content: GrpcCall(
        "statistics over gRPC" if method == "ModelStatistics" else "other gRPC", f"{_SERVICE}/{method}", (content,)
    ),
    st.sampled_from(_TELLING),
    _contents,
)
_keys = st.sampled_from([(), ((GRPC_HEADER, ""),), ((GRPC_HEADER, "x"),), ((GRPC_HEADER, "0" * 64),)])
grpc_controls: SearchStrategy[GrpcCall] = st.builds(
    lambda method, content, key: GrpcCall(f"{CONTROL} over gRPC", f"{_SERVICE}/{method}", (content,), metadata=key),
    st.sampled_from(_CONTROLS),
    _contents,
    _keys,
)
"""Restricted methods without their key."""


def grpc_calls(unary: str) -> SearchStrategy[GrpcCall]:
    """Return inference by one message and by streams of some, questions, and bytes that are no message.

    unary: the model that answers ModelInfer.
    """
    return values.weighted((3, _inferring(unary)), (2, _streaming), (2, _telling))


_frames = st.builds(
    lambda payload, length, head: struct.pack(">I", len(payload) if length is None else length)[1:] + head + payload,
    st.binary(max_size=60),
    st.sampled_from([None, None, None, 0, 1, 9, 16384, 2**24 - 1]),
    st.builds(
        lambda kind, flags, stream: struct.pack(">BBI", kind, flags, stream),
        st.integers(0, 12),
        st.sampled_from([0, 1, 4, 5, 8, 32, 255]),
        st.sampled_from([0, 1, 2, 3, 2**31 - 1, 2**32 - 1]),
    ),
)
"""Frames of HTTP/2, of any type, on any stream; their length isn't always their payload's."""

grpc_noise: SearchStrategy[RawBytes] = st.one_of(
    st.lists(_frames, max_size=4).map(lambda frames: _PREFACE + b"".join(frames)),
    st.builds(bytes.__add__, st.sampled_from(BEGINNINGS), st.binary(max_size=300)),
).map(lambda raw: RawBytes("bytes on the gRPC port", "grpc", raw))
