"""Whether the files of a checkpoint's folder can be read and are whole, before a library that won't name them tries.

A copy that was cut short is the usual case: of a checkpoint in thirty files, the operator wants to know which one.
Reads the headers of the weights, not the weights. The format is safetensors': eight bytes with the header's length,
the header in JSON with each tensor's end, the tensors. Standard library only; knows nothing about models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_engine.errors import CheckpointError

_JSON = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_LENGTH_BYTES = 8
_LONGEST_HEADER = 100_000_000
"""Bytes; safetensors' own bound."""


def check_files(folder: Path) -> None:
    """Look at each file of the folder that will be loaded, if it is there. What has to be there is for others to say.

    Raises CheckpointError that names the first one that can't be read or isn't whole.
    """
    for name in _JSON:
        if (folder / name).exists():
            _object(folder / name)
    for path in _weight_files(folder):
        _check_weights(path)


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights: one, or as many as the index names."""
    if (folder / _WEIGHTS).exists():
        return [folder / _WEIGHTS]
    index = folder / _INDEX
    if not index.exists():
        return []
    named = _object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise _error(index, "it has no weight_map from weights to files")
    return [folder / name for name in sorted(set(named.values()))]


def _object(path: Path) -> Mapping[str, Any]:
    """Return a file's JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise _error(path, str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise _error(path, f"it is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise _error(path, "it is no JSON object")
    return content


def _check_weights(path: Path) -> None:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or not 0 < length <= min(size - _LENGTH_BYTES, _LONGEST_HEADER):
                raise _error(path, f"it has {size} bytes and no whole header: it was cut short, or is no safetensors")
            header = json.loads(file.read(length))
        tensors = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        whole = _LENGTH_BYTES + length + max(tensors, default=0)
    except OSError as error:
        raise _error(path, str(error.strerror)) from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _error(path, f"its header is no safetensors: {error!r}") from error
    if size != whole:
        raise _error(path, f"it has {size} bytes; its header says {whole}")


def _error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"can't load {path.parent}: {path.name}: {' '.join(reason.split())}")
