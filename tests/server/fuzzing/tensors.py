"""Hypothesis strategies for tensors, as /infer has them in JSON and in binary: right, and wrong in every part.

Knows the form of the requests (the KServe protocol with Triton's binary extension), not how they are sent.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from server.clients import DTYPES, OUTPUTS
from server.fuzzing.values import anything, inputs, names, texts

DATATYPES = ("BOOL", "UINT8", "UINT64", "INT8", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES", "BF16")
_FORMATS = {"INT32": "<i", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}
_SIZES = (0, 1, -1, 2, 3, 7, 64, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1, -(2**31), -(2**63))

_MOST_ELEMENTS = 2**20
"""Of a tensor with its data in JSON: Triton 2.51 allocates what the shape says before it looks at the data, and ends if
it can't (docs/limits.md, docs/security.md).
"""

sizes: SearchStrategy[int] = st.sampled_from(_SIZES)
shapes: SearchStrategy[list[int]] = st.lists(sizes, max_size=4)

_parameters = st.dictionaries(
    st.sampled_from(
        [
            *("binary_data_size", "binary_data", "binary_data_output", "classification", "priority", "timeout"),
            *("sequence_id", "sequence_start", "sequence_end", "shared_memory_region", "shared_memory_byte_size"),
            *("shared_memory_offset", "headers", "triton_enable_empty_final_response", "no such one"),
        ]
    ),
    st.booleans() | sizes | texts | anything,
    max_size=3,
)
_output = st.fixed_dictionaries(
    {"name": st.sampled_from([*OUTPUTS, "text_input", "", "nothing"])}, optional={"parameters": _parameters}
)
_one_in = {count: st.integers(1, count).map(lambda number: number == 1) for count in (6, 12)}
_other_parts = st.fixed_dictionaries(
    {},
    optional={
        "id": texts | anything,
        "parameters": _parameters | anything,
        "outputs": st.lists(_output, max_size=3) | anything,
        "inputs": anything,
    },
)
_wrong_tensor = st.fixed_dictionaries(
    {},
    optional={
        "name": names | texts | anything,
        "shape": shapes | anything,
        "datatype": st.sampled_from(DATATYPES) | anything,
        "data": anything,
        "parameters": _parameters | anything,
    },
)
_missing = st.sampled_from(["nothing", "name", "shape", "datatype", "data", "parameters"])
_some_bytes = st.binary(max_size=9)
_near = st.sampled_from([-1, 1, -4, 4, 100, -(10**6), 10**6])
_no_lengths = st.sampled_from(["x", "", "0", "-1", "1e3", str(2**31), str(2**63), str(10**30)])


@dataclass(frozen=True)
class InferBody:
    """The body of a request to /infer. json_bytes: how long its JSON says it is; None if it doesn't say."""

    content: bytes
    json_bytes: object = None


def to_json(value: object, escaped: bool = True) -> bytes:
    """Write JSON, lone surrogates and NaN as well; escaped: in ASCII."""
    return json.dumps(value, ensure_ascii=escaped).encode("utf-8", "surrogatepass")


@st.composite
def infer_bodies(draw: st.DrawFn) -> InferBody:
    """Good and bad requests, in JSON alone or with their tensors behind it."""
    asked = draw(inputs)
    binary = draw(st.booleans())
    tensors: list[object] = []
    tail = b""
    for name, value in asked.items():
        tensor, data = draw(_tensor(name, value, binary))
        tensors.append(tensor)
        tail += data
    whole: dict[str, Any] = {"inputs": tensors}
    if draw(_one_in[6]):
        whole |= draw(_other_parts)
    head = to_json(whole, draw(st.booleans()))
    if not binary:
        return InferBody(head)
    # Mostly what is true, or near it.
    said: object = len(head)
    if draw(_one_in[6]):
        said = draw(_near.map(len(head).__add__) | _no_lengths)
    return InferBody(head + tail, said)


@st.composite
def _tensor(draw: st.DrawFn, name: str, value: object, binary: bool) -> tuple[dict[str, object], bytes]:
    """Return a tensor in JSON, and the bytes that belong behind it."""
    datatype = DTYPES.get(name, "INT32")
    data = value if isinstance(value, list) else [value]
    tensor: dict[str, object] = {"name": name, "shape": [1, len(data)], "datatype": datatype}
    tail = b""
    if binary:
        tail = b"".join(packed(item, datatype) for item in data)
        tensor["parameters"] = {"binary_data_size": len(tail)}
    else:
        tensor["data"] = data
    # Of one tensor in twelve some parts are wrong, missing, or there twice.
    if draw(_one_in[12]):
        tensor |= draw(_wrong_tensor)
        tensor.pop(draw(_missing), None)
        tail += draw(_some_bytes)
        if "data" in tensor and _elements(tensor.get("shape")) > _MOST_ELEMENTS:
            del tensor["data"]
    return tensor, tail


def _elements(shape: object) -> float:
    """Return the size of the largest tensor that a shape may be taken for: Triton multiplies until it overflows."""
    parts = shape if isinstance(shape, list) else [shape]
    return math.prod(max(1.0, abs(part)) for part in parts if isinstance(part, int | float))


def packed(value: object, datatype: str) -> bytes:
    """Return a value as the binary extension has it; one of a wrong kind as whatever bytes it has."""
    text = as_bytes(value)
    if datatype not in _FORMATS:
        return struct.pack("<I", len(text)) + text
    try:
        return struct.pack(_FORMATS[datatype], value)
    except (struct.error, OverflowError):
        return text


def as_bytes(value: object) -> bytes:
    """Return a text in UTF-8, lone surrogates included; anything else as it is shown."""
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else repr(value).encode()
