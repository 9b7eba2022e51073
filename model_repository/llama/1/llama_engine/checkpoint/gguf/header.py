"""The header of a GGUF file: its metadata, and where its tensors are.

Format: docs/gguf.md of ggml; the types of tensors are those of the package gguf. Its own reader, `GGUFReader`, doesn't
compare counts with the file's size, so that an array cut off by the file's end is read forever, and it makes an object
for each value: 11 s and 660 MiB for a vocabulary of 262,144 tokens, which take 0.2 s here.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isfinite, prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np

from llama_engine.bounds import show
from llama_engine.checkpoint.json_files import LFS_ADVICE, is_lfs_pointer
from llama_engine.errors import CheckpointError

Value: TypeAlias = int | float | bool | str | tuple["int | float | bool | str", ...]


class BlockType(NamedTuple):
    """A type of GGUF. It saves the values of a row in blocks: `elements` of them in `bytes`."""

    name: str
    elements: int
    bytes: int


_MAX_HEADER = 100_000_000
"""Maximum size of a header in bytes: five times that of a vocabulary of 262,144 tokens."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    """The place of a tensor. shape: rows first, as in PyTorch. begin: offset of its first byte in the file."""

    path: Path
    type: BlockType
    shape: tuple[int, ...]
    begin: int

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) // self.type.elements * self.type.bytes


@dataclass(frozen=True)
class GgufFile:
    """A checkpoint's metadata by key and tensors by GGUF's names. path: the file, or its first shard."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The model's architecture, such as llama. Raises CheckpointError if the file doesn't say it."""
        return self.text("general.architecture")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head of queries and keys. Raises CheckpointError if the file doesn't say them."""
        return self.count("attention.key_length", self.count("embedding_length") // self.count("attention.head_count"))

    def text(self, key: str) -> str:
        """Return a string. Raises CheckpointError if it is missing or isn't one."""
        if not isinstance(value := self.metadata.get(key), str):
            raise self.error(f"{key} is {show(value)}, not a string")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture, such as `rope.freq_base`.

        Raises CheckpointError if it isn't a finite number, or is missing and has no default.
        """
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.error(f"{key} is {show(value)}, not a finite number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of the architecture, at least 1 or the default. Raises CheckpointError for others."""
        value = self.number(key, default)
        if not isinstance(value, int) or (value < 1 and value != default):
            raise self.error(f"{self.architecture}.{key} is {value}, not an integer of at least 1")
        return value

    def has(self, key: str) -> bool:
        """Return whether there is a value of the architecture."""
        return f"{self.architecture}.{key}" in self.metadata

    def error(self, reason: str) -> CheckpointError:
        """Return the error that names the file."""
        return _error(self.path, reason)


def find_gguf(path: Path) -> Path | None:
    """Return the GGUF file that a path names: itself, or the only one in a folder without safetensors; else None.

    Of a checkpoint in shards it is the first. Raises CheckpointError if the folder has several.
    """
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or any(path.glob("*.safetensors")):
        return None
    files = [file for file in sorted(path.glob("*.gguf")) if (shard := _SHARD.search(file.name)) is None
             or int(shard[1]) == 1]  # fmt: skip
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{path} has {len(files)} GGUF files ({names}); set model to one of them")
    return files[0] if files else None


def read_gguf(path: Path) -> GgufFile:
    """Read the header of a file, or those of all shards of a checkpoint. Raises CheckpointError for invalid ones."""
    shard = _SHARD.search(path.name)
    if shard is None:
        file = _read_file(path)
        if file.metadata.get("split.count", 1) not in (0, 1):
            raise file.error(f"it is one of {show(file.metadata['split.count'])} shards and not named as one")
        return file
    count = int(shard[2])
    if not 1 <= int(shard[1]) <= count:
        raise _error(path, f"it is named as shard {int(shard[1])} of {count}")
    paths = [path.with_name(f"{path.name[: shard.start()]}-{n:05}-of-{shard[2]}.gguf") for n in range(1, count + 1)]
    if absent := [file.name for file in paths if not file.is_file()]:
        raise CheckpointError(f"can't load {path}: {len(absent)} of {count} shards are missing, first {absent[0]}")
    files = [_read_file(file) for file in paths]
    tensors: dict[str, GgufTensor] = {}
    for index, file in enumerate(files):
        if (file.metadata.get("split.no"), file.metadata.get("split.count")) != (index, count):
            raise file.error(f"it doesn't say that it is shard {index + 1} of {count}")
        if twice := tensors.keys() & file.tensors.keys():
            raise file.error(f"{min(twice)} is in an earlier shard, too")
        tensors |= file.tensors
    return GgufFile(files[0].path, files[0].metadata, tensors)


def _read_file(path: Path) -> GgufFile:
    # Imported here because only GGUF files need it.
    from gguf import GGML_QUANT_SIZES

    types = {kind.value: BlockType(kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
    try:
        with path.open("rb") as opened:
            return _Header(path, opened, types).read()
    except OSError as error:
        raise _error(path, str(error.strerror)) from error
    except UnicodeDecodeError as error:
        raise _error(path, "its header has a string that is not UTF-8") from error
    except (ValueError, struct.error) as error:
        raise _error(path, str(error)) from error


class _Header:
    """Reads one file's header from its start. Raises ValueError with the reason for an invalid one."""

    def __init__(self, path: Path, file: BinaryIO, types: Mapping[int, BlockType]) -> None:
        self._path, self._file, self._types, self._position = path, file, types, 0
        self._size = path.stat().st_size
        self._end = min(self._size, _MAX_HEADER)

    def read(self) -> GgufFile:
        if (start := self._take(4)) != b"GGUF":
            pointer = is_lfs_pointer(start + self._file.read(100))
            raise ValueError(LFS_ADVICE if pointer else "it doesn't begin with GGUF")
        if (version := self._number("<I")) not in (2, 3):
            raise ValueError(f"it is of version {version}; this engine reads 2 and 3, little-endian")
        tensors, keys = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                raise ValueError(f"it has {show(key)} twice")
            metadata[key] = self._value(self._number("<I"))
        infos = dict(self._tensor() for _ in range(tensors))
        if len(infos) != tensors:
            raise ValueError("it has two tensors of one name")
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {show(alignment)}, not a power of two")
        data = -(-self._position // alignment) * alignment
        located = {name: replace(info, begin=data + info.begin) for name, info in infos.items()}
        for name, tensor in located.items():
            if (end := tensor.begin + tensor.bytes) > self._size:
                raise ValueError(f"it has {self._size} bytes, and {show(name)} ends at {end}: truncated")
        return GgufFile(self._path, metadata, located)

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._string()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"{show(name)} has {dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number("<Q") for _ in range(dimensions)]))
        number, offset = self._number("<I"), self._number("<Q")
        if (kind := self._types.get(number)) is None:
            raise ValueError(f"{show(name)} is of type {number}, which the package gguf doesn't know")
        if min(shape) < 1 or shape[-1] % kind.elements:
            raise ValueError(f"{show(name)} has shape {shape}, not whole blocks of {kind.name}")
        return name, GgufTensor(self._path, kind, shape, offset)

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _ARRAY:
            kind, count = self._number("<I"), self._number("<Q")
            if kind == _STRING:
                return tuple(self._string() for _ in range(count))
            if kind in _SCALARS:
                data = self._take(count * struct.calcsize(_SCALARS[kind]))
                return struct.unpack(f"<{count}{_SCALARS[kind][1]}", data)
        raise ValueError(f"it has a value of type {kind}, which this engine doesn't know")

    def _number(self, layout: str) -> int:
        # Return a float only where the caller expects any value.
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        if layout == _SCALARS[_FLOAT32]:
            # Return the decimal number that was saved: 1e-6 and not 9.99999997e-7.
            value = float(str(np.float32(value)))
        return value  # type: ignore[no-any-return]  # struct's values have no type

    def _string(self) -> str:
        return self._take(self._number("<Q")).decode()

    def _take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > self._end - self._position:
            raise ValueError(f"its header needs {count} bytes at {self._position} and ends at {self._end}")
        self._position += count
        return self._file.read(count)


def _error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"can't load {path}: {reason}")
