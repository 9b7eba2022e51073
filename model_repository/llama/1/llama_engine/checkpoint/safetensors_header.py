"""The header of a safetensors file, which is read before its tensors: the library checks it, and doesn't tell offsets.

A file has eight bytes with the header's length, the header as JSON with each tensor's dtype, shape and offsets, and the
tensors, without gaps. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from llama_engine.bounds import show
from llama_engine.checkpoint.json_files import LFS, LFS_ADVICE, MAX_JSON, file_error, is_lfs_pointer

_LENGTH_BYTES = 8

_MAX_NAME = 1000
"""Maximum characters of a tensor's name."""


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
        with path.open("rb") as file:
            start = file.read(len(LFS))
            if is_lfs_pointer(start):
                raise file_error(path, LFS_ADVICE)
            length = int.from_bytes(start[:_LENGTH_BYTES], "little")
            if max_bytes < length <= MAX_JSON:
                raise file_error(path, f"its header has {length} bytes; it must have at most {max_bytes}")
            with safe_open(path, framework="numpy"):
                file.seek(_LENGTH_BYTES)
                header = json.loads(file.read(length))
    except OSError as error:
        raise file_error(path, str(error.strerror)) from error
    except SafetensorError as error:
        raise file_error(path, f"it is truncated, or not safetensors: {error}") from error
    header.pop("__metadata__", None)
    # They are shown in messages and in the log.
    for name in header:
        if not name.isprintable() or len(name) > _MAX_NAME:
            raise file_error(path, f"{show(name)} is no name of a tensor")
    first = _LENGTH_BYTES + length
    return {
        name: TensorHeader(entry["dtype"], tuple(entry["shape"]), *(first + offset for offset in entry["data_offsets"]))
        for name, entry in header.items()
    }
