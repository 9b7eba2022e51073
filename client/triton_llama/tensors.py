"""Tensors of the contract: a request's inputs, the same for HTTP and gRPC; their binary form; gRPC's messages.

A value that no INT32, FP32, UINT64 or UTF-8 string can hold is refused here, because it can't be sent. The server
checks all other bounds, so that there is one copy of each.
"""

from __future__ import annotations

import secrets
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import SupportsFloat

from tritonclient.grpc import service_pb2 as messages
from tritonclient.utils import deserialize_bytes_tensor

from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.outputs import EMBEDDING_OUTPUT_NAMES, OUTPUT_NAMES
from triton_llama.sampling_params import INPUTS, SamplingParams

Value = str | int | float | bool
_FORMATS = {"INT32": "i", "INT64": "q", "UINT64": "Q", "FP32": "f", "BOOL": "?"}
_NUMBERS = {name: struct.calcsize(f"<{_FORMATS[name]}") for name in ("INT32", "INT64", "UINT64", "FP32")}
"""The bytes of each type of numbers."""
_FP32_MAX = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


@dataclass(frozen=True)
class Tensor:
    """One input of shape [1, len(values)]."""

    name: str
    datatype: str
    """Triton's element type: BYTES, INT32, FP32, UINT64 or BOOL."""
    values: tuple[Value, ...]

    @property
    def shape(self) -> list[int]:
        """Batch of one, and its elements."""
        return [1, len(self.values)]

    def encode(self) -> bytes:
        """Return Triton's binary form: little endian; a string follows its length in bytes as an unsigned 32-bit."""
        if self.datatype == "BYTES":
            texts = [str(value).encode() for value in self.values]
            return b"".join(struct.pack("<I", len(text)) + text for text in texts)
        return struct.pack(f"<{len(self.values)}{_FORMATS[self.datatype]}", *self.values)


def encode_request(
    model: str, request_id: str, tensors: Sequence[Tensor], outputs: Sequence[str]
) -> messages.ModelInferRequest:
    """Encode a request for these outputs; `ModelInfer` and `ModelStreamInfer` take the same message."""
    message = messages.ModelInferRequest(model_name=model, id=request_id)
    for tensor in tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensor.encode())
    for name in outputs:
        message.outputs.add(name=name)
    return message


def decode_response(response: messages.ModelInferResponse) -> dict[str, list[str] | list[int] | list[float]]:
    """Return the values of a response's outputs, by name. Raises ServerError for malformed ones."""
    # An output without content is missing.
    pairs = zip(response.outputs, response.raw_output_contents, strict=False)
    return {output.name: decode(output.name, output.datatype, content) for output, content in pairs}


def decode(name: str, datatype: str, content: bytes) -> list[str] | list[int] | list[float]:
    """Return an output's values from Triton's binary form.

    Raises:
        ServerError: the content is malformed, or has a datatype that no output of the contract has.
    """
    try:
        if datatype == "BYTES":
            return [text.decode() for text in deserialize_bytes_tensor(content)]
        if datatype in _NUMBERS:
            return list(struct.unpack(f"<{len(content) // _NUMBERS[datatype]}{_FORMATS[datatype]}", content))
    except (struct.error, UnicodeDecodeError):
        pass
    raise ServerError(f"the server's output {name} is {len(content)} bytes of type {datatype}, can't be decoded")


@dataclass(frozen=True)
class PreparedRequest:
    """One prompt, ready to be sent over either protocol. outputs: names of those that are requested."""

    request_id: str
    seed: int
    tensors: tuple[Tensor, ...]
    outputs: tuple[str, ...] = OUTPUT_NAMES


def prepare(prompt: str, params: SamplingParams, stream: bool = False) -> PreparedRequest:
    """Turn one prompt into the full set of inputs, so that Triton can batch it with any other of this client.

    Raises:
        RejectedInputError: a value that its tensor can't hold; the message names field, value and bound.
    """
    seed = secrets.randbits(64) if params.seed is None else params.seed
    tensors = [Tensor("text_input", "BYTES", (_string("text_input", prompt),))]
    for name, (type_, is_list) in INPUTS.items():
        value = seed if name == "seed" else getattr(params, name)
        if value is not None:
            values = _list(name, value, type_) if is_list else (_CHECKS[type_](name, value),)
            tensors.append(Tensor(name, "BYTES" if type_ == "STRING" else type_, values))
    if stream:
        tensors.append(Tensor("stream", "BOOL", (True,)))
    return PreparedRequest(uuid.uuid4().hex, int(seed), tuple(tensors))


def prepare_embeddings(texts: Sequence[str], lora_name: str) -> list[PreparedRequest]:
    """Turn each text into a request for its embedding, which has no inputs for sampling.

    Raises:
        TypeError: one text instead of several.
        RejectedInputError: as `prepare`.
    """
    if isinstance(texts, str):
        raise TypeError("texts is one str, must be a sequence of them")
    inputs = [Tensor("text_input", "BYTES", (_string("text_input", text),)) for text in texts]
    flag = Tensor("return_embedding", "BOOL", (True,))
    adapter = Tensor("lora_name", "BYTES", (_string("lora_name", lora_name),))
    return [PreparedRequest(uuid.uuid4().hex, 0, (text, flag, adapter), EMBEDDING_OUTPUT_NAMES) for text in inputs]


def _integer(bits: int, signed: bool) -> Callable[[str, object], Value]:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)

    def check(name: str, value: object) -> Value:
        # NumPy's integers are Integral.
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise RejectedInputError(f"{name} is {value!r}, must be an integer")
        if not low <= int(value) <= high:
            raise RejectedInputError(f"{name} is {value}, must lie in {low} ... {high}")
        return int(value)

    return check


def _fp32(name: str, value: object) -> Value:
    if isinstance(value, (bool, str, bytes)) or not isinstance(value, SupportsFloat):
        raise RejectedInputError(f"{name} is {value!r}, must be a number")
    # Not so of NaN, which JSON can't carry.
    if not -_FP32_MAX <= value <= _FP32_MAX:
        raise RejectedInputError(f"{name} is {value!r}, must lie in {-_FP32_MAX:g} ... {_FP32_MAX:g} (32-bit float)")
    # Rounded here: JSON then carries the same number as the binary form.
    (rounded,) = struct.unpack("<f", struct.pack("<f", value))
    return float(rounded)


def _bool(name: str, value: object) -> Value:
    # NumPy's bool is no bool, but has its dtype.
    if not isinstance(value, bool) and getattr(value, "dtype", None) != "bool":
        raise RejectedInputError(f"{name} is {value!r}, must be True or False")
    return bool(value)


def _string(name: str, value: object) -> Value:
    if not isinstance(value, str):
        raise RejectedInputError(f"{name} is {value!r}, must be a string")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RejectedInputError(
            f"{name} has {value[error.start]!r} at character {error.start}, must be text that UTF-8 can encode"
        ) from error
    return value


def _list(name: str, value: object, type_: str) -> tuple[Value, ...]:
    elements, padding = _LISTS[type_]
    # A string is a sequence too, of its letters: certainly a mistake.
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RejectedInputError(f"{name} is {value!r}, must be a list of {elements}")
    return tuple(_CHECKS[type_](name, item) for item in value) or (padding,)


_CHECKS: Mapping[str, Callable[[str, object], Value]] = {
    "STRING": _string,
    "INT32": _integer(32, signed=True),
    "UINT64": _integer(64, signed=False),
    "FP32": _fp32,
    "BOOL": _bool,
}
_LISTS: Mapping[str, tuple[str, Value]] = {
    "STRING": ("strings", ""),
    "INT32": ("integers", -1),
    "FP32": ("numbers", 0.0),
}
"""The elements of a list in words, and the only one of an empty list, which the server ignores."""
