"""The tensors in a GGUF file under the names and in the order of rows that transformers' models have."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod

import torch

from llama_engine.bounds import show
from llama_engine.checkpoint.architecture import Architecture
from llama_engine.checkpoint.formats.linear_format import FLOATS
from llama_engine.checkpoint.gguf.blocks import check_type, dequantized
from llama_engine.checkpoint.gguf.header import BlockType, GgufFile, GgufTensor
from llama_engine.checkpoint.per_channel import for_each_block, row_blocks
from llama_engine.checkpoint.tensor_names import EMBEDDING, HEAD, NORM, layer_linears, layer_norms, layer_prefix
from llama_engine.checkpoint.tensors import SavedTensor, SavedTensors, read_bytes
from llama_engine.checkpoint.weights import Embedding
from llama_engine.errors import CheckpointError

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Divisors of RoPE's frequencies, which are a part of the config."""

INTERLEAVED = ("llama", "granite", "smollm3")
"""Architectures whose files have the rows of query and key heads in the order 0, d/2, 1, d/2 + 1, ...

RoPE rotates neighbours there, and the halves of a head in transformers. Source: `permute` in llama.cpp's converter.
"""


class GgufTensors(SavedTensors):
    """The tensors by transformers' names. The dtype of a quantized one is F32: reading dequantizes it."""

    def __init__(self, file: GgufFile, architecture: Architecture) -> None:
        """Raise CheckpointError for a tensor that isn't the architecture's or has an unsupported type."""
        # The base class's __init__ isn't called: it reads safetensors.
        self.source = file.path
        self._head_dim = file.head_dim if file.architecture in INTERLEAVED else None
        self._tensors: dict[str, GgufTensor] = {}
        self._headers = {}
        modules = _modules(file, architecture)
        for original, tensor in file.tensors.items():
            if original in ROPE_TENSORS:
                continue
            module, _, suffix = original.rpartition(".")
            if module not in modules or suffix not in ("weight", "bias"):
                raise file.error(f"tensor {show(original)} isn't one of a {file.architecture} this engine serves")
            name = f"{modules[module]}.{suffix}"
            if tensor.type.name not in FLOATS:
                if len(tensor.shape) != 2:
                    raise file.error(f"{original} has shape {tensor.shape} in {tensor.type.name}, not two dimensions")
                try:
                    check_type(tensor.type)
                except CheckpointError as error:
                    raise file.error(f"{original}: {error}") from error
            dtype = tensor.type.name if tensor.type.name in FLOATS else "F32"
            self._tensors[name] = tensor
            self._headers[name] = SavedTensor(
                tensor.path, dtype, tensor.shape, tensor.begin, tensor.begin + tensor.bytes
            )

    def block_type(self, name: str) -> BlockType | None:
        """Return the type of a quantized tensor; None for floats and for a name that isn't saved."""
        tensor = self._tensors.get(name)
        return None if tensor is None or tensor.type.name in FLOATS else tensor.type

    def blocks(self, name: str, rows: slice) -> torch.Tensor:
        """Return rows of a quantized tensor as saved, uint8 [rows, bytes].

        Raises CheckpointError if the file can't be read or is too short.
        """
        first, count, order = self._in_file(name, rows)
        tensor = self._tensors[name]
        height = tensor.bytes // tensor.shape[0]
        result = torch.empty(count, height, dtype=torch.uint8)
        read_bytes(tensor.path, tensor.begin + first * height, result, name)
        return result if order is None else result[order]

    def as_saved(self, name: str) -> Embedding:
        """Return a matrix in the form in which it is saved. Raises CheckpointError as `blocks`."""
        kind = self.block_type(name)
        if kind is None:
            return super().as_saved(name)
        return Embedding(self.blocks(name, slice(0, self._headers[name].shape[0])), partial(dequantized, kind=kind))

    def read_into(self, name: str, result: torch.Tensor, first: int = 0) -> None:
        """Read rows from `first` on into `result`, a contiguous tensor of the dtype, until it is full.

        Raises CheckpointError if the file can't be read or is too short.
        """
        kind = self.block_type(name)
        if kind is None and self._head_dim_of(name) is None:
            super().read_into(name, result, first)
            return

        def convert(part: slice) -> None:
            rows = slice(first + part.start, first + part.stop)
            result[part] = self._floats(name, rows) if kind is None else dequantized(self.blocks(name, rows), kind)

        blocks = row_blocks(len(result), prod(result.shape[1:]))
        # The reader's threads read one block at a time.
        if len(blocks) == 1:
            convert(blocks[0])
        else:
            for_each_block(blocks, convert)

    def _floats(self, name: str, rows: slice) -> torch.Tensor:
        first, count, order = self._in_file(name, rows)
        result = torch.empty(count, *self._headers[name].shape[1:], dtype=self._headers[name].torch_dtype)
        super().read_into(name, result, first)
        return result[order]

    def _in_file(self, name: str, rows: slice) -> tuple[int, int, torch.Tensor | None]:
        """Return first row and number of rows in the file that have these rows, and where among them each is."""
        dim = self._head_dim_of(name)
        if dim is None:
            return rows.start, rows.stop - rows.start, None
        # Read whole heads.
        first, last = rows.start // dim * dim, -(-rows.stop // dim) * dim
        numbers = torch.arange(last - first).view(-1, dim // 2, 2).transpose(1, 2).flatten()
        return first, last - first, numbers[rows.start - first : rows.stop - first]

    def _head_dim_of(self, name: str) -> int | None:
        """Return the number of a head's rows if they are interleaved, else None."""
        dim = self._head_dim
        if dim is None or not name.rsplit(".", 1)[0].endswith(("self_attn.q_proj", "self_attn.k_proj")):
            return None
        # Other shapes aren't this model's and are refused.
        return dim if self._headers[name].shape[0] % dim == 0 else None


def _modules(file: GgufFile, architecture: Architecture) -> Mapping[str, str]:
    """Return transformers' names of the model's modules by GGUF's, which are the package's."""
    # Imported here because only GGUF files need it.
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH[file.architecture.upper()], architecture.layers)
    linears = [part.name for parts in layer_linears(architecture).values() for part in parts]
    in_layer = [*linears, *(name for name, _ in layer_norms(architecture).values())]
    layers = [layer_prefix(index) + name for index in range(architecture.layers) for name in in_layer]
    named = {names.get_name(module): module for module in (EMBEDDING, NORM, HEAD, *layers)}
    # A tied head has no tensor.
    return {name: module for name, module in named.items() if name is not None}
