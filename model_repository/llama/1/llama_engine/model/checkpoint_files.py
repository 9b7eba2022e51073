"""Checks that a checkpoint's files are readable and complete, because transformers' errors do not name the file.

The usual defect is a truncated copy of one weight file. Only the headers of weight files are read. A safetensors file
has eight bytes with the header's length, the header as JSON with each tensor's end offset, and the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_engine.errors import CheckpointError

_JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000
"""Maximum size of a header in bytes; the limit of the safetensors library."""


def check_files(folder: Path) -> None:
    """Check each existing file that the loader reads; the loader itself detects missing files.

    Raises CheckpointError naming the first file that is unreadable or incomplete.
    """
    for name in _JSON:
        if (folder / name).exists():
            _object(folder / name)
    for path in weight_files(folder):
        _check_weights(path)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files: the single file, or the files listed in the index."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        return []
    named = _object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise _error(index, "it has no weight_map from weights to files")
    return [folder / name for name in sorted(set(named.values()))]


def _object(path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError if there is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise _error(path, str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise _error(path, f"it is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise _error(path, "it is not a JSON object")
    return content


def _check_weights(path: Path) -> None:
    begin, header = read_header(path)
    try:
        whole = begin + max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (TypeError, LookupError) as error:
        raise _error(path, f"its header is not valid safetensors: {error!r}") from error
    if (size := path.stat().st_size) != whole:
        raise _error(path, f"it has {size} bytes; its header says {whole}")


def read_header(path: Path) -> tuple[int, Mapping[str, Any]]:
    """Return the offset of the tensors in a weight file, and their headers by name: dtype, shape, data_offsets.

    Raises CheckpointError if the file is unreadable or its header is incomplete.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER):
                raise _error(path, f"it has {size} bytes and no whole header: truncated, or not safetensors")
            header = json.loads(file.read(length))
        return _LENGTH_BYTES + length, {name: tensor for name, tensor in header.items() if name != "__metadata__"}
    except OSError as error:
        raise _error(path, str(error.strerror)) from error
    except (ValueError, AttributeError, RecursionError) as error:
        raise _error(path, f"its header is not valid safetensors: {error!r}") from error


def _error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"can't load {path.parent}: {path.name}: {' '.join(reason.split())}")
