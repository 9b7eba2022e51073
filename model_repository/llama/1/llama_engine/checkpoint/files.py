"""Checks that a checkpoint's files are readable and complete, because transformers' errors do not name the file.

The usual defect is a truncated copy of one weight file. Only the headers of weight files are read. A safetensors file
has eight bytes with the header's length, the header as JSON with each tensor's dtype, shape and offsets, and the
tensors, without gaps. Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from llama_engine.bounds import show
from llama_engine.errors import CheckpointError

JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MODULES, TRANSFORMER, POOLING = "modules.json", "sentence_bert_config.json", "1_Pooling"
"""sentence-transformers' list of modules, its config of the first one, and its folder of the second one."""

_LENGTH_BYTES = 8
_MAX_JSON = 100_000_000
"""Maximum size of a header and of a JSON file in bytes; for headers, the limit of the safetensors library."""

_LFS = b"version https://git-lfs.github.com/spec/"
LFS_ADVICE = "it is a Git LFS pointer and not the file itself; run `git lfs pull` in the clone, or download the file"

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


def check_files(folder: Path) -> None:
    """Check each existing file that the loader reads; the loader itself detects missing files.

    Raises CheckpointError naming the first file that is unreadable or incomplete.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        # Reading a pipe or a device waits or does not end.
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise file_error(path, "it is neither a file nor a folder")
    for name in JSON_FILES:
        if (folder / name).exists():
            read_object(folder / name)
    read_headers(folder)


def read_headers(folder: Path) -> Mapping[str, tuple[Path, TensorHeader]]:
    """Return each saved tensor's file and header by name.

    Raises CheckpointError if a file is unreadable or incomplete, or if two files have a tensor of the same name.
    """
    tensors: dict[str, tuple[Path, TensorHeader]] = {}
    for path in weight_files(folder):
        for name, header in read_header(path).items():
            if name in tensors:
                raise file_error(path, f"it has the tensor {name}, which {tensors[name][0].name} has, too")
            tensors[name] = path, header
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files: the single file, or the files listed in the index.

    A listed file is in the folder; like every file it may be a link, as in the cache of the hub.
    """
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        return []
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise file_error(index, "it has no weight_map from weights to files")
    names = sorted(set(named.values()))
    for name in names:
        if not name.endswith(".safetensors") or Path(name).name != name or "\0" in name:
            raise file_error(
                index, f"its weight_map has {show(name)}, which is no name of a safetensors file beside it"
            )
    return [folder / name for name in names]


def weights_advice(folder: Path) -> str:
    """Return the end of an error: what a folder has instead of readable weights, and what to do if it has any."""
    if shards := sorted(path.name for path in folder.glob("*.safetensors")):
        return f"it has {shards[0]} and no {INDEX}, which lists the files of the weights; download that, too"
    if pickles := sorted(path.name for suffix in ("bin", "pth", "pt") for path in folder.glob(f"*.{suffix}")):
        return (
            f"it has {pickles[0]} and no safetensors; files of pickles can run code and aren't read: save the model "
            f"with transformers' save_pretrained, which writes {WEIGHTS}"
        )
    return f"it has no {WEIGHTS}, nor an index of several such files"


def is_lfs_pointer(start: bytes) -> bool:
    """Return whether a file that begins with these bytes is a pointer of Git LFS, as a clone without LFS has them."""
    return start.startswith(_LFS)


def read_object(path: Path, max_bytes: int = _MAX_JSON) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises CheckpointError if there is none, or if the file is larger."""
    content = read_json(path, max_bytes)
    if not isinstance(content, dict):
        raise file_error(path, "it is not a JSON object")
    return content


def read_json(path: Path, max_bytes: int = _MAX_JSON) -> object:
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


def read_header(path: Path, max_bytes: int = _MAX_JSON) -> Mapping[str, TensorHeader]:
    """Return the headers of the tensors in a weight file by name. max_bytes: limit of the header's size.

    Raises CheckpointError if the file is unreadable, or if the header is invalid or describes another file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS))
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


def file_error(path: Path, reason: str) -> CheckpointError:
    """Return the error of a file in a checkpoint's folder."""
    return CheckpointError(f"can't load {path.parent}: {path.name}: {' '.join(reason.split())}")
