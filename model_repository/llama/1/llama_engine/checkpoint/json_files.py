"""JSON files of a checkpoint's folder, and how each error names its file, which transformers' do not.

A file that is a pointer of Git LFS is told apart from a damaged one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llama_engine.errors import CheckpointError

MAX_JSON = 100_000_000
"""Maximum bytes of a JSON file and of a safetensors header; for headers, the limit of the safetensors library."""

LFS = b"version https://git-lfs.github.com/spec/"
LFS_ADVICE = "it is a Git LFS pointer and not the file itself; run `git lfs pull` in the clone, or download the file"


def read_object(path: Path, max_bytes: int = MAX_JSON) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError if there is none, or if the file is larger."""
    content = read_json(path, max_bytes)
    if not isinstance(content, dict):
        raise file_error(path, "it is not a JSON object")
    return content


def read_json(path: Path, max_bytes: int = MAX_JSON) -> object:
    """Return the JSON value in a file. Raises CheckpointError if there is none, or if the file is larger."""
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise file_error(path, f"it has {size} bytes; a JSON file has at most {max_bytes}")
        data = path.read_bytes()
        if is_lfs_pointer(data):
            raise file_error(path, LFS_ADVICE)
        content: object = json.loads(data)
    except OSError as error:
        raise file_error(path, str(error.strerror)) from error
    except (ValueError, RecursionError) as error:
        raise file_error(path, f"it is not valid JSON: {error}") from error
    return content


def is_lfs_pointer(start: bytes) -> bool:
    """Return whether a file that begins with these bytes is a pointer of Git LFS, as a clone without LFS has them."""
    return start.startswith(LFS)


def file_error(path: Path, reason: str) -> CheckpointError:
    """Return the error of a file in a checkpoint's folder."""
    return CheckpointError(f"can't load {path.parent}: {path.name}: {' '.join(reason.split())}")
