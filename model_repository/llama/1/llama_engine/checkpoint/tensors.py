"""The tensors in a checkpoint's safetensors files: their headers, and their contents, read directly into memory.

Uses read(2), because a memory mapping takes three times the CPU time in page faults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from llama_engine.checkpoint.files import read_headers, weight_files, weights_advice
from llama_engine.checkpoint.weights import Embedding
from llama_engine.errors import CheckpointError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}

_DIGEST_BYTES = 64
"""Bytes of a tensor in `SavedTensors.digest`, from its middle."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor's header. dtype: safetensors' name, such as BF16. begin, end: range of its bytes in the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """The number of its bytes."""
        return self.end - self.begin

    @property
    def torch_dtype(self) -> torch.dtype:
        """The PyTorch dtype. Raises CheckpointError for an unsupported dtype."""
        if self.dtype not in _DTYPES:
            raise CheckpointError(f"{self.path} has a tensor in {self.dtype}, not in {', '.join(_DTYPES)}")
        return _DTYPES[self.dtype]


class SavedTensors(Mapping[str, SavedTensor]):
    """The headers of all tensors by name.

    Names have the prefix `model.`, as in LlamaForCausalLM; it is added for a model that was saved without its head.
    """

    def __init__(self, folder: Path) -> None:
        """Read the headers of all files. Raises CheckpointError if there are none or one is invalid."""
        if not weight_files(folder):
            raise CheckpointError(f"can't load {folder}: {weights_advice(folder)}")
        self.source = folder
        """The folder, or the GGUF file, that errors name."""
        self._headers = {name: SavedTensor(path, *header) for name, (path, header) in read_headers(folder).items()}
        if not any(name.startswith("model.") for name in self._headers):
            self._headers = {
                name if name.startswith("lm_head.") else f"model.{name}": header
                for name, header in self._headers.items()
            }

    def __getitem__(self, name: str) -> SavedTensor:
        return self._headers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._headers)

    def __len__(self) -> int:
        return len(self._headers)

    def digest(self) -> str:
        """Return a SHA-256 that differs for other weights: of the headers, and of some bytes of each tensor."""
        digest = hashlib.sha256()
        for name, saved in sorted(self._headers.items()):
            size = min(saved.nbytes, _DIGEST_BYTES)
            with saved.path.open("rb", buffering=0) as file:
                file.seek((saved.begin + saved.end - size) // 2)
                digest.update(f"{name} {saved.dtype} {saved.shape} ".encode() + file.read(size))
        return digest.hexdigest()

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Return a tensor, or the selected rows of it, in the saved dtype."""
        saved = self._headers[name]
        shape, first = saved.shape, 0
        if rows is not None:
            shape, first = (rows.stop - rows.start, *saved.shape[1:]), rows.start
        tensor = torch.empty(shape, dtype=saved.torch_dtype)
        self.read_into(name, tensor, first)
        return tensor

    def as_saved(self, name: str) -> Embedding:
        """Return a matrix in the form in which it is saved. Raises CheckpointError as `read_into`."""
        return Embedding(self.read(name))

    def read_into(self, name: str, result: torch.Tensor, first: int = 0) -> None:
        """Read rows from `first` on into `result`, a contiguous tensor of the saved dtype, until it is full.

        Raises CheckpointError if the file can't be read or is too short.
        """
        saved = self._headers[name]
        assert result.dtype == saved.torch_dtype
        assert result.is_contiguous()
        size = result.element_size()
        offset = first * prod(saved.shape[1:]) * size
        if prod(saved.shape) * size != saved.nbytes or offset + result.nbytes > saved.nbytes:
            raise CheckpointError(f"{saved.path} has {saved.nbytes} bytes of {name}, {saved.shape}")
        read_bytes(saved.path, saved.begin + offset, result, name)


def read_bytes(path: Path, offset: int, result: torch.Tensor, name: str) -> None:
    """Fill `result`, a contiguous tensor, from an offset in a file. Raises CheckpointError if the file is too short.

    name: the tensor's, for the error message.
    """
    left = result.view(-1).view(torch.uint8).numpy().data
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left:
            count = file.readinto(left)
            if not count:
                raise CheckpointError(f"{path} ends inside {name}")
            left = left[count:]
