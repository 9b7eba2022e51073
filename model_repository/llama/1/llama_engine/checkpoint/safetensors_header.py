"""The header of a safetensors file, which is read before its tensors.

A file has eight bytes with the header's length, the header as JSON with each tensor's dtype, shape and offsets, and the
tensors, without gaps. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from llama_engine.bounds import show
from llama_engine.checkpoint.json_files import LFS, LFS_ADVICE, MAX_JSON, file_error, is_lfs_pointer

_LENGTH_BYTES = 8

_MAX_NAME, _MAX_DIMENSIONS = 1000, 8
"""Maximum characters of a tensor's name, and dimensions of its shape."""

_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes of a number by dtype. Tensors in others, of less than a byte, have no known size; the engine reads none."""


class TensorHeader(NamedTuple):
    """A tensor's entry in a header. dtype: safetensors' name, such as BF16. begin, end: its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path, max_bytes: int = MAX_JSON) -> Mapping[str, TensorHeader]:
    """Return the headers of the tensors in a weight file by name. max_bytes: limit of the header's size.

    Raises CheckpointError if the file is unreadable, or if the header is invalid or describes another file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(LFS))
            if is_lfs_pointer(start):
                raise file_error(path, LFS_ADVICE)
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            file.seek(_LENGTH_BYTES)
            if size < _LENGTH_BYTES or not 0 < length <= size - _LENGTH_BYTES:
                raise file_error(path, f"it has {size} bytes and no whole header: truncated, or not safetensors")
            if length > max_bytes:
                raise file_error(path, f"its header has {length} bytes; it must have at most {max_bytes}")
            header = json.loads(file.read(length), object_pairs_hook=_without_duplicates)
        begin = _LENGTH_BYTES + length
        tensors = {name: _tensor(name, entry, begin) for name, entry in header.items() if name != "__metadata__"}
    except OSError as error:
        raise file_error(path, str(error.strerror)) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise file_error(path, f"its header is not valid safetensors: {error}") from error
    whole = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1][2:]):
        if tensor.begin != whole:
            raise file_error(path, f"its header is not valid safetensors: {name} doesn't begin where another one ends")
        whole = tensor.end
    if size != whole:
        raise file_error(path, f"it has {size} bytes; its header says {whole}")
    return tensors


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"it has {show(key)} twice")
        result[key] = value
    return result


def _tensor(name: str, entry: object, begin: int) -> TensorHeader:
    """Return a tensor's header. begin: offset of all tensors. Raises ValueError naming tensor, field and value."""
    if not name.isprintable() or len(name) > _MAX_NAME:
        raise ValueError(f"{show(name)} is no name of a tensor")
    dtype, shape, offsets = (
        entry.get(field) if isinstance(entry, dict) else None for field in ("dtype", "shape", "data_offsets")
    )
    if not isinstance(dtype, str):
        raise ValueError(f"dtype of {show(name)} is {show(dtype)}")
    # Sizes beyond int64 can't be a file's, and products of many of them would take long.
    if (not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS
            or not all(type(size) is int and 0 <= size < 1 << 63 for size in shape)):  # fmt: skip
        raise ValueError(f"shape of {show(name)} is {show(shape)}")
    first, end = offsets if isinstance(offsets, list) and len(offsets) == 2 else (None, None)
    if type(first) is not int or type(end) is not int or not 0 <= first <= end:
        raise ValueError(f"data_offsets of {show(name)} are {show(offsets)}")
    if dtype in _ITEM_BYTES and prod(shape) * _ITEM_BYTES[dtype] != end - first:
        raise ValueError(f"{name} is {dtype} of shape {show(shape)}, and has {end - first} bytes")
    return TensorHeader(dtype, tuple(shape), begin + first, begin + end)
