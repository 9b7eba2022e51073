"""A request as tensors, and the answer's tensors as a completion: the contract's names, types and shapes.

Knows no protocol, and no bound but those of the wire types themselves: a value that no INT32, FP32, UINT64 or UTF-8
string can hold is refused here because it could not be sent; everything else is for the server to judge.
"""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsFloat

import numpy as np
from numpy.typing import NDArray

from triton_llama.completion import Completion
from triton_llama.errors import RejectedInputError, ServerError
from triton_llama.piece import Piece
from triton_llama.sampling_params import SamplingParams

Array = NDArray[Any]

OUTPUT_NAMES = ("text_output", "finish_reason", "num_input_tokens", "num_output_tokens")
_FP32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Tensor:
    """One input: `values` has shape [1, n]."""

    name: str
    datatype: str
    """Triton's name of the element type: BYTES, INT32, FP32, UINT64 or BOOL."""
    values: Array


@dataclass(frozen=True)
class PreparedRequest:
    """One prompt, ready to be sent under any protocol."""

    request_id: str
    seed: int
    tensors: tuple[Tensor, ...]


class OutputTensors(Protocol):
    """What the protocols' results have in common."""

    def as_numpy(self, name: str) -> Array | None:
        """Return the output of that name, or None if the answer lacks it."""


def prepare(prompt: str, params: SamplingParams, *, stream: bool = False) -> PreparedRequest:
    """Turn one prompt into the full set of inputs, so that Triton can batch it with any other of this client.

    `stream` asks for the text in pieces.

    Raises:
        RejectedInputError: a value that its tensor can't hold; it names the field, the value and the bound.
    """
    seed = secrets.randbits(64) if params.seed is None else params.seed
    tensors = [Tensor("text_input", "BYTES", _strings("text_input", [prompt]))]
    for name, datatype, encode in _INPUTS:
        value = seed if name == "seed" else getattr(params, name)
        if value is not None:
            tensors.append(Tensor(name, datatype, encode(name, value)))
    if stream:
        tensors.append(Tensor("stream", "BOOL", _bool("stream", True)))
    return PreparedRequest(uuid.uuid4().hex, int(seed), tuple(tensors))


def read_completion(outputs: OutputTensors, request: PreparedRequest) -> Completion:
    """Turn the four outputs, each [1, 1], into a completion.

    Raises:
        ServerError: an output is missing or isn't what the contract says.
    """
    return Completion(
        text=_read_text(outputs, "text_output"),
        finish_reason=_read_text(outputs, "finish_reason"),
        num_input_tokens=_read_count(outputs, "num_input_tokens"),
        num_output_tokens=_read_count(outputs, "num_output_tokens"),
        request_id=request.request_id,
        seed=request.seed,
    )


def read_piece(outputs: OutputTensors) -> Piece:
    """Turn the four outputs, each [1, 1], of one response of a stream into a piece.

    Raises:
        ServerError: an output is missing or isn't what the contract says.
    """
    return Piece(
        text=_read_text(outputs, "text_output"),
        finish_reason=_read_text(outputs, "finish_reason"),
        num_input_tokens=_read_count(outputs, "num_input_tokens"),
        num_output_tokens=_read_count(outputs, "num_output_tokens"),
    )


def _integer(name: str, value: object, dtype: type[np.int32] | type[np.uint64]) -> Array:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise RejectedInputError(f"{name} is {value!r}, must be an integer")
    bounds = np.iinfo(dtype)
    if not bounds.min <= int(value) <= bounds.max:
        raise RejectedInputError(f"{name} is {value}, must lie in {bounds.min} ... {bounds.max}")
    return np.array([[int(value)]], dtype=dtype)


def _int32(name: str, value: object) -> Array:
    return _integer(name, value, np.int32)


def _uint64(name: str, value: object) -> Array:
    return _integer(name, value, np.uint64)


def _fp32(name: str, value: object) -> Array:
    if isinstance(value, (bool, str, bytes)) or not isinstance(value, SupportsFloat):
        raise RejectedInputError(f"{name} is {value!r}, must be a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise RejectedInputError(f"{name} is an integer too large for a 32-bit float") from error
    # NaN and infinity can be sent, and the server says what it thinks of them.
    if np.isfinite(number) and abs(number) > _FP32_MAX:
        raise RejectedInputError(f"{name} is {value!r}, must lie in {-_FP32_MAX:g} ... {_FP32_MAX:g} (32-bit float)")
    return np.array([[number]], dtype=np.float32)


def _bool(name: str, value: object) -> Array:
    if not isinstance(value, (bool, np.bool_)):
        raise RejectedInputError(f"{name} is {value!r}, must be True or False")
    return np.array([[bool(value)]], dtype=np.bool_)


def _strings(name: str, texts: Sequence[object]) -> Array:
    encoded = np.empty((1, len(texts)), dtype=np.object_)
    for column, text in enumerate(texts):
        if not isinstance(text, str):
            raise RejectedInputError(f"{name} is {text!r}, must be a string")
        try:
            encoded[0, column] = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RejectedInputError(
                f"{name} has {text[error.start]!r} at character {error.start}, must be text that UTF-8 can encode"
            ) from error
    return encoded


def _words(name: str, value: object) -> Array:
    # One string is a sequence of strings too: its letters, which nobody means.
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise RejectedInputError(f"{name} is {value!r}, must be a list of strings")
    return _strings(name, value or [""])


_INPUTS: tuple[tuple[str, str, Callable[[str, object], Array]], ...] = (
    ("max_tokens", "INT32", _int32),
    ("min_tokens", "INT32", _int32),
    ("temperature", "FP32", _fp32),
    ("top_k", "INT32", _int32),
    ("top_p", "FP32", _fp32),
    ("repetition_penalty", "FP32", _fp32),
    ("frequency_penalty", "FP32", _fp32),
    ("presence_penalty", "FP32", _fp32),
    ("seed", "UINT64", _uint64),
    ("stop_words", "BYTES", _words),
    ("bad_words", "BYTES", _words),
    ("exclude_input_in_output", "BOOL", _bool),
)


def _read_item(outputs: OutputTensors, name: str) -> object:
    values = outputs.as_numpy(name)
    if values is None:
        raise ServerError(f"the server's answer lacks the output {name}")
    if values.shape != (1, 1):
        raise ServerError(f"the server's output {name} has shape {list(values.shape)}, must be [1, 1]")
    item: object = values[0, 0]
    return item


def _read_text(outputs: OutputTensors, name: str) -> str:
    item = _read_item(outputs, name)
    if isinstance(item, str):
        return item
    if not isinstance(item, bytes):
        raise ServerError(f"the server's output {name} is of type {type(item).__name__}, must be a string")
    try:
        return item.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ServerError(f"the server's output {name} is not UTF-8 at byte {error.start}") from error


def _read_count(outputs: OutputTensors, name: str) -> int:
    item = _read_item(outputs, name)
    if not isinstance(item, np.integer):
        raise ServerError(f"the server's output {name} is of type {type(item).__name__}, must be an integer")
    return int(item)
