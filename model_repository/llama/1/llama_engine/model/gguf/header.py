"""The header of a GGUF file: its metadata, and where its tensors are.

Format: docs/gguf.md of ggml. Counts and lengths in a file are compared with its size before anything is allocated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, NoReturn, TypeAlias

import numpy as np

from llama_engine.errors import CheckpointError

Value: TypeAlias = int | float | bool | str | tuple["int | float | bool | str", ...]


class BlockType(NamedTuple):
    """How a type saves the values of a row: `elements` of them in `bytes`."""

    name: str
    elements: int
    bytes: int


TYPES: Mapping[int, BlockType] = {number: BlockType(name, elements, size) for number, name, elements, size in (
    (0, "F32", 1, 4), (1, "F16", 1, 2), (2, "Q4_0", 32, 18), (3, "Q4_1", 32, 20), (6, "Q5_0", 32, 22),
    (7, "Q5_1", 32, 24), (8, "Q8_0", 32, 34), (9, "Q8_1", 32, 40), (10, "Q2_K", 256, 84), (11, "Q3_K", 256, 110),
    (12, "Q4_K", 256, 144), (13, "Q5_K", 256, 176), (14, "Q6_K", 256, 210), (15, "Q8_K", 256, 292),
    (16, "IQ2_XXS", 256, 66), (17, "IQ2_XS", 256, 74), (18, "IQ3_XXS", 256, 98), (19, "IQ1_S", 256, 50),
    (20, "IQ4_NL", 32, 18), (21, "IQ3_S", 256, 110), (22, "IQ2_S", 256, 82), (23, "IQ4_XS", 256, 136),
    (28, "F64", 1, 8), (29, "IQ1_M", 256, 56), (30, "BF16", 1, 2), (34, "TQ1_0", 256, 54), (35, "TQ2_0", 256, 66),
    (39, "MXFP4", 32, 17), (40, "NVFP4", 64, 36),
)}  # fmt: skip
"""The types of tensors by their numbers in ggml.h."""

_MAX_HEADER = 100_000_000
"""Maximum size of a header in bytes: five times that of a vocabulary of 262,144 tokens."""

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is. shape: rows first, as in PyTorch. begin: offset of its first byte in the file."""

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
            raise self.error(f"{key} is {_shown(value)}, not a string")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a number of the architecture, such as `rope.freq_base`.

        Raises CheckpointError if it isn't a finite number, or is missing and has no default.
        """
        key = f"{self.architecture}.{key}"
        value = self.metadata.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.error(f"{key} is {_shown(value)}, not a finite number")
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
            raise file.error(f"it is one of {_shown(file.metadata['split.count'])} shards and not named as one")
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
    try:
        with path.open("rb") as opened:
            return _Header(path, opened).read()
    except OSError as error:
        raise _error(path, str(error.strerror)) from error


class _Header:
    """Reads one file's header from its start."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file, self._position = path, file, 0
        self._size = path.stat().st_size
        self._end = min(self._size, _MAX_HEADER)

    def read(self) -> GgufFile:
        if self._take(4) != b"GGUF":
            self._refuse("it doesn't begin with GGUF")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            self._refuse("it is big-endian; convert it with gguf-convert-endian, of the package gguf")
        if version not in (2, 3):
            self._refuse(f"it is of version {version}; this engine reads 2 and 3")
        tensors, keys = self._number("<Q"), self._number("<Q")
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = self._string()
            if key in metadata:
                self._refuse(f"it has {_shown(key)} twice")
            metadata[key] = self._value(self._number("<I"))
        infos = dict(self._tensor() for _ in range(tensors))
        if len(infos) != tensors:
            self._refuse("it has two tensors of one name")
        return GgufFile(self._path, metadata, self._located(infos, metadata))

    def _located(self, infos: Mapping[str, GgufTensor], metadata: Mapping[str, Value]) -> Mapping[str, GgufTensor]:
        """Return the tensors with their offsets in the file instead of those in its data."""
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            self._refuse(f"general.alignment is {_shown(alignment)}, not a power of two")
        data = -(-self._position // alignment) * alignment
        result = {}
        for name, info in infos.items():
            result[name] = GgufTensor(info.path, info.type, info.shape, data + info.begin)
            if (end := result[name].begin + info.bytes) > self._size:
                self._refuse(f"it has {self._size} bytes, and {name} ends at {end}: truncated")
        return result

    def _tensor(self) -> tuple[str, GgufTensor]:
        name = self._string()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._refuse(f"{_shown(name)} has {dimensions} dimensions, not 1 to {_MAX_DIMENSIONS}")
        shape = tuple(reversed([self._number("<Q") for _ in range(dimensions)]))
        number, offset = self._number("<I"), self._number("<Q")
        if number not in TYPES:
            self._refuse(f"{_shown(name)} is of type {number}, which this engine doesn't know")
        if min(shape) < 1 or shape[-1] % TYPES[number].elements:
            self._refuse(f"{_shown(name)} has shape {shape}, not whole blocks of {TYPES[number].name}")
        return name, GgufTensor(self._path, TYPES[number], shape, offset)

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            self._refuse(f"it has a value of type {kind}, which this engine doesn't know")
        kind, count = self._number("<I"), self._number("<Q")
        if kind == _STRING:
            return tuple(self._string() for _ in range(count))
        if kind not in _SCALARS:
            self._refuse(f"it has an array of values of type {kind}, which this engine doesn't know")
        data = self._take(count * struct.calcsize(_SCALARS[kind]))
        return struct.unpack(f"<{count}{_SCALARS[kind][1]}", data)

    def _number(self, layout: str) -> int:
        # A float only where the caller expects any value.
        (value,) = struct.unpack(layout, self._take(struct.calcsize(layout)))
        if layout == _SCALARS[_FLOAT32]:
            # The decimal number that was saved: 1e-6 and not 9.99999997e-7.
            value = float(str(np.float32(value)))
        return value  # type: ignore[no-any-return]  # struct's values have no type

    def _string(self) -> str:
        try:
            return self._take(self._number("<Q")).decode()
        except UnicodeDecodeError as error:
            raise _error(self._path, f"a string before byte {self._position} is not UTF-8") from error

    def _take(self, count: int) -> bytes:
        """Return the next bytes."""
        if count > self._end - self._position:
            self._refuse(f"its header needs {count} bytes at {self._position} and ends at {self._end}")
        self._position += count
        if len(data := self._file.read(count)) < count:
            self._refuse(f"it ends before byte {self._position}")
        return data

    def _refuse(self, reason: str) -> NoReturn:
        raise _error(self._path, reason)


def _shown(value: object) -> str:
    """Return a value of a file for a message, in one short line."""
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _error(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"can't load {path}: {reason}")
