"""Tensors of the contract: a request's inputs encoded, a response's outputs decoded, the same for HTTP and gRPC.

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

from triton_llama.completion import Chunk, Completion
from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.sampling_params import INPUTS, SamplingParams

OUTPUT_NAMES = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
"""The outputs that are read: the first four of every response, the last one of those that have it."""

_ALWAYS = OUTPUT_NAMES[:4]

Value = str | int | float | bool
_FORMATS = {"INT32": "i", "UINT64": "Q", "FP32": "f", "BOOL": "?"}
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


def decode(name: str, datatype: str, content: bytes) -> Value:
    """Return the only value of an output in Triton's binary form.

    Raises:
        ServerError: it has several values, or a datatype that no output of the contract has.
    """
    if datatype == "INT32" and len(content) == 4:
        return int.from_bytes(content, "little", signed=True)
    if datatype == "BYTES" and len(content) == 4 + int.from_bytes(content[:4], "little"):
        return content[4:].decode()
    raise ServerError(f"the server's output {name} is {len(content)} bytes of type {datatype}, can't be decoded")


@dataclass(frozen=True)
class PreparedRequest:
    """One prompt, ready to be sent over either protocol."""

    request_id: str
    seed: int
    tensors: tuple[Tensor, ...]


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


def read_chunk(outputs: Mapping[str, object]) -> Chunk:
    """Check the outputs of one response, by name.

    Raises:
        ServerError: an output is missing or isn't what the contract says.
    """
    missing = [name for name in _ALWAYS if name not in outputs]
    if missing:
        raise ServerError(f"the server's answer lacks the output {missing[0]}")
    text, finish_reason, num_input_tokens, num_output_tokens = (outputs[name] for name in _ALWAYS)
    num_cached_tokens = outputs.get("num_cached_tokens")
    if not (
        isinstance(text, str)
        and isinstance(finish_reason, str)
        and isinstance(num_input_tokens, int)
        and isinstance(num_output_tokens, int)
        and isinstance(num_cached_tokens, int | None)
    ):
        raise ServerError(f"the server's outputs {', '.join(OUTPUT_NAMES)} must be two strings and three integers")
    return Chunk(text, finish_reason, num_input_tokens, num_output_tokens, num_cached_tokens)


def read_completion(outputs: Mapping[str, object], request: PreparedRequest) -> Completion:
    """Check the outputs of the only response to a request; raises as `read_chunk`."""
    return Completion(**vars(read_chunk(outputs)), request_id=request.request_id, seed=request.seed)


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
