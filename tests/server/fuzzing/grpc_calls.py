"""Hypothesis strategies for calls to the gRPC port: messages of the right type with wrong contents, and wrong bytes.

Only methods that read or infer: those that change the server need a key (test_restricted.py).
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from server.clients import DTYPES, OUTPUTS
from server.fuzzing.sending import GrpcCall
from server.fuzzing.tensors import DATATYPES, as_bytes, packed, shapes, sizes
from server.fuzzing.values import inputs, mangled, names, prompts
from tritonclient.grpc import service_pb2

_SERVICE = "/inference.GRPCInferenceService"
_TELLING = (
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"),
    *("NoSuchMethod", ""),
)
_INT64 = st.sampled_from([0, 1, -1, 2, 2**31, 2**63 - 1, -(2**63)])
_TEXT = prompts | st.text(max_size=20)
_FIELDS = {"INT32": "int_contents", "UINT64": "uint64_contents", "FP32": "fp32_contents", "BOOL": "bool_contents"}

_parameter: SearchStrategy[dict[str, Any]] = st.one_of(
    st.booleans().map(lambda value: {"bool_param": value}),
    _INT64.map(lambda value: {"int64_param": value}),
    _TEXT.map(lambda value: {"string_param": value}),
    st.floats().map(lambda value: {"double_param": value}),
    st.integers(0, 2**64 - 1).map(lambda value: {"uint64_param": value}),
    st.just({}),
)
_parameters = st.dictionaries(
    st.sampled_from(
        [
            *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "classification", "id"),
            *("shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "binary_data", "x", ""),
            "triton_enable_empty_final_response",
        ]
    ),
    _parameter,
    max_size=2,
)


_kinds = st.sampled_from(["infer", "infer", "infer", "stream", "stream", "telling", "bytes"])
_telling = st.sampled_from(_TELLING)
_asked_with_bytes = st.sampled_from(["ModelInfer", "ModelMetadata", "ModelStatistics"])
_noise = st.binary(max_size=100)
_counts = st.integers(0, 3)
_one_in = {count: st.integers(1, count).map(lambda number: number == 1) for count in (5, 12)}
_models = st.sampled_from(["llama", "llama", "", "x", "l" * 3000, "../llama"])
_versions = st.sampled_from(["", "", "1", "2", "-1", "x", "9" * 40])
_outputs = st.lists(st.sampled_from([*OUTPUTS, "", "text_input"]), max_size=3)
_raw = st.lists(st.binary(max_size=20), max_size=2)
_tensor_names = names | _TEXT
_datatypes = st.sampled_from([*DATATYPES, "", "x"])
_contents = st.lists(sizes, max_size=2)


@st.composite
def _messages(draw: st.DrawFn, alone: bool) -> bytes:
    """Return a ModelInferRequest, serialized, and sometimes not whole.

    alone: no other one shares its stream. Several always name the model that there is, and are whole: where Triton 2.51
    refuses one for its model or version while it refuses another one for something else, it aborts (a decoupled model's
    responses and those of no model are written to the stream without knowing of each other).
    """
    request = service_pb2.ModelInferRequest(model_name="llama")
    raw = draw(st.booleans())
    for name, value in draw(inputs).items():
        tensor = request.inputs.add(name=name, datatype=DTYPES.get(name, "INT32"))
        data = value if isinstance(value, list) else [value]
        tensor.shape.extend([1, len(data)])
        if raw:
            request.raw_input_contents.append(b"".join(packed(item, tensor.datatype) for item in data))
        else:
            _fill(tensor.contents, tensor.datatype, data)
        if draw(_one_in[12]):
            _distort(draw, tensor)
    if draw(_one_in[5]):
        _set(request.parameters, draw(_parameters))
        if alone:
            request.model_name = draw(_models)
            request.model_version = draw(_versions)
        request.id = draw(_TEXT)
        for name in draw(_outputs):
            _set(request.outputs.add(name=name).parameters, draw(_parameters))
        request.raw_input_contents.extend(draw(_raw))
    whole: bytes = request.SerializeToString()
    return draw(mangled(whole)) if alone else whole


_message = _messages(alone=True)
_one_of_several = _messages(alone=False)


@st.composite
def grpc_calls(draw: st.DrawFn) -> GrpcCall:
    """Inference by one message and by streams of some, questions, and bytes that are no message."""
    kind = draw(_kinds)
    if kind == "telling":
        return GrpcCall(f"{_SERVICE}/{draw(_telling)}", (draw(_noise),))
    if kind == "bytes":
        return GrpcCall(f"{_SERVICE}/{draw(_asked_with_bytes)}", (draw(_noise),))
    if kind == "infer":
        return GrpcCall(f"{_SERVICE}/ModelInfer", (draw(_message),))
    count = draw(_counts)
    messages = [draw(_one_of_several if count > 1 else _message) for _ in range(count)]
    return GrpcCall(f"{_SERVICE}/ModelStreamInfer", tuple(messages), streams=True)


def _distort(draw: st.DrawFn, tensor: Any) -> None:  # noqa: ANN401 - tritonclient is not annotated
    """Make one tensor wrong."""
    tensor.name = draw(_tensor_names)
    tensor.datatype = draw(_datatypes)
    del tensor.shape[:]
    tensor.shape.extend(draw(shapes))
    _set(tensor.parameters, draw(_parameters))
    tensor.contents.int64_contents.extend(draw(_contents))


def _fill(contents: Any, datatype: str, data: list[object]) -> None:  # noqa: ANN401 - as above
    """Put values into the field of their type; what the field can't hold, as text into the one for bytes."""
    try:
        if datatype in _FIELDS:
            getattr(contents, _FIELDS[datatype]).extend(data)
            return
    except (TypeError, ValueError, OverflowError):
        contents.Clear()
    contents.bytes_contents.extend(as_bytes(item) for item in data)


def _set(parameters: Any, values: dict[str, dict[str, Any]]) -> None:  # noqa: ANN401 - as above
    for name, value in values.items():
        parameters[name].CopyFrom(service_pb2.InferParameter(**value))
